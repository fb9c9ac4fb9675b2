"""Executes lowered plans as the hosts and the GPUs of all ranks would over NCCL, without processes.

It shares no code with `validate_messages`, which it checks. Per rank there are

    a host     runs the program ahead of the GPU: it enqueues computations, sends and receives, and
               blocks only for a header (both to send and to receive one) and, if connections are
               not opened before the step, in the first operation of a group and a peer
    a stream   of computations, in order; it waits where a computation uses a message
    queues     one for each process group and peer, for sends and receives; an operation starts when
               the stream has reached the point where the host enqueued it, all operations ahead of
               it have ended, and the peer has the matching operation at the same place

A message of the wrong channel is delivered as on NCCL, which does not compare them.

The hardware may add conditions:

    lanes      an operation also waits for the operations ahead of it in its lane, which may belong
               to other groups and peers; the stream waits for an operation in lane 0 at once
    loading    the host waits, before a launch that loads a kernel, until all operations that it has
               enqueued have ended
    buffers    a send ends without its receive
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from pipemega.pipeline.plan.instructions import Kind
from pipemega.pipeline.plan.lowering import warmup_cut

SENDS = {Kind.SEND_ACTIVATION: ("A", 0), Kind.SEND_GRADIENT: ("G", -1)}
RECEIVES = {Kind.RECV_ACTIVATION: ("A", -1), Kind.RECV_GRADIENT: ("G", 0)}


@dataclass(eq=False)
class Transfer:
    """A send or a receive of one rank."""

    sends: bool
    lane: deque
    can_start: bool = False
    has_ended: bool = False

    @property
    def may_run(self):
        return self.can_start and self.lane[0] is self

    def end(self):
        assert self.lane.popleft() is self
        self.has_ended = True


@dataclass
class Step:
    """What a rank knows of the messages of one step: (channel, micro-batch) -> transfers."""

    unposted: dict = field(default_factory=lambda: defaultdict(deque))  # by channel
    requested: dict = field(default_factory=dict)  # None: not posted yet
    sends: dict = field(default_factory=dict)
    forwards: set = field(default_factory=set)


@dataclass
class Rank:
    """The host's view of one rank."""

    number: int
    stream: deque = field(default_factory=deque)  # ("start" or "wait", transfer)
    queues: dict = field(default_factory=lambda: defaultdict(deque))  # (group, peer) -> transfers
    open: set = field(default_factory=set)  # (group, peer) with a communicator
    wants: tuple | None = None  # the (group, peer) whose communicator the host creates now
    knows: set = field(default_factory=set)  # boundaries whose header has arrived
    told: set = field(default_factory=set)  # boundaries whose header was sent
    lanes: dict = field(default_factory=lambda: defaultdict(deque))  # transfers that have not ended
    launched: set = field(default_factory=set)  # (kind, stage) whose kernels are loaded
    # (group, peer) -> messages that were sent here and not received
    buffered: Counter = field(default_factory=Counter)


class Simulation:
    """One pipeline.

    Args:
        plan: lowered.
        group_of: (direction, boundary) -> process group; "A" is an activation, "G" a gradient.
        shapes: as in the transport.
        opened: whether all connections are opened before the step.
        queues: number of hardware queues of a rank. None: enough.
        streams: number of streams for the messages of a rank. None: enough.
        loads: kernels are loaded "never", by the "first" launch of a kind of instruction of a
            stage, or by "every" launch.
        buffers: a send ends without its receive.
    """

    def __init__(
        self,
        plan,
        group_of,
        shapes="declared",
        opened=True,
        *,
        queues=None,
        streams=None,
        loads="never",
        buffers=False,
    ):
        self.plan, self.group_of, self.opened = plan, group_of, opened
        self.queues, self.streams, self.loads, self.buffers = queues, streams, loads, buffers
        # rank -> its channels, in the order in which they are opened: by group, then by ranks.
        by_rank = defaultdict(list)
        pair_of = {channel: self._pair(channel) for channel in group_of}
        for channel in sorted(group_of, key=lambda c: (group_of[c], pair_of[c])):
            for rank in pair_of[channel]:
                by_rank[rank].append(channel)
        self.number = {(r, c): i for r, found in by_rank.items() for i, c in enumerate(found)}
        self.shapes = "exchanged" if plan.forward_only else shapes
        self.ranks = [Rank(number) for number in range(plan.num_ranks)]
        self.moves = 0  # of any host, stream or queue

    def run(self, steps=1):
        """Return whether all ranks get through `steps` steps, which follow without a pause."""
        return self._complete(self._whole(self.plan.programs, steps))

    def run_with_discarded_warmup(self):
        """Return whether all ranks get through a discarded warm-up and then a whole step."""
        cut = warmup_cut(self.plan)
        warmups = [self._warmup(rank, cut) for rank in self.ranks]
        return self._complete(warmups) and self._complete(self._whole(cut.plan.programs, 1))

    # The hosts; each yield is a moment at which other ranks and the GPU may proceed.

    def _whole(self, programs, steps):
        return [self._host(rank, programs[rank.number], steps) for rank in self.ranks]

    def _pair(self, channel):
        return tuple(sorted(self.plan.rank_of_stage[channel[1] : channel[1] + 2]))

    def _host(self, rank, program, steps):
        for _ in range(steps):
            state = Step()
            yield from self._steps(rank, program, state)
            self._wait_for_sends(rank, state)

    def _warmup(self, rank, cut):
        state = Step()
        yield from self._steps(rank, cut.plan.programs[rank.number][: cut.stop[rank.number]], state)
        for step in cut.unread[rank.number]:
            yield from self._request(rank, state, ("A", step.stage - 1), step.microbatch)
        for channel, m in list(state.requested):
            yield from self._use(rank, state, channel, m)
        self._wait_for_sends(rank, state)

    def _steps(self, rank, program, state):
        for kind, stage, m in program:
            if kind in SENDS:
                direction, offset = SENDS[kind]
                yield from self._send(rank, state, (direction, stage + offset), m)
            elif kind in RECEIVES:
                direction, offset = RECEIVES[kind]
                yield from self._request(rank, state, (direction, stage + offset), m)
            elif kind is Kind.FORWARD:
                yield from self._use(rank, state, ("A", stage - 1), m)
                yield from self._load(rank, kind, stage)
                state.forwards.add((stage, m))
            elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                yield from self._use(rank, state, ("G", stage), m)
                for transfer in state.sends.pop((("A", stage), m), ()):
                    rank.stream.append(("wait", transfer))
                yield from self._load(rank, kind, stage)
            elif kind is Kind.BACKWARD_WEIGHT:
                yield from self._load(rank, kind, stage)
            self.moves += 1
            yield

    def _load(self, rank, kind, stage):
        is_first = (kind, stage) not in rank.launched
        rank.launched.add((kind, stage))
        if self.loads == "every" or (self.loads == "first" and is_first):
            while rank.stream or any(rank.lanes.values()):
                yield

    def _send(self, rank, state, channel, m):
        transfers = state.sends.setdefault((channel, m), [])
        direction, boundary = channel
        if direction == "A" and not self._is_known(boundary, rank.told):
            rank.told.add(boundary)
            while rank.stream:  # a copy from the host waits for the GPU
                yield
            transfers.append((yield from self._enqueue(rank, channel, sends=True)))
        transfers.append((yield from self._enqueue(rank, channel, sends=True)))

    def _request(self, rank, state, channel, m):
        state.requested[channel, m] = None
        state.unposted[channel].append(m)
        yield from self._post(rank, state, channel)

    def _post(self, rank, state, channel):
        direction, boundary = channel
        unposted = state.unposted[channel]
        while unposted:
            ready = (
                self._is_known(boundary, rank.knows)
                if direction == "A"
                else (boundary, unposted[0]) in state.forwards
            )
            if not ready:
                return
            m = unposted.popleft()
            state.requested[channel, m] = yield from self._enqueue(rank, channel, sends=False)

    def _use(self, rank, state, channel, m):
        if (channel, m) not in state.requested:
            return
        while state.requested[channel, m] is None:
            first = state.unposted[channel].popleft()
            if channel[0] == "A":
                header = yield from self._enqueue(rank, channel, sends=False)
                rank.stream.append(("wait", header))
                while rank.stream:  # the host reads the header
                    yield
                rank.knows.add(channel[1])
            transfer = yield from self._enqueue(rank, channel, sends=False)
            state.requested[channel, first] = transfer
            yield from self._post(rank, state, channel)
        rank.stream.append(("wait", state.requested.pop((channel, m))))

    def _wait_for_sends(self, rank, state):
        for transfers in state.sends.values():
            rank.stream.extend(("wait", transfer) for transfer in transfers)

    def _is_known(self, boundary, headers):
        return self.shapes == "declared" or (self.shapes == "cached" and boundary in headers)

    def _enqueue(self, rank, channel, *, sends):
        stage, group = channel[1], self.group_of[channel]
        peer = self.ranks[sum(self.plan.rank_of_stage[stage : stage + 2]) - rank.number]
        key, peers_key = (group, peer.number), (group, rank.number)
        if not self.opened and key not in rank.open:
            rank.wants = key
            while key not in rank.open:
                if peer.wants == peers_key:
                    rank.open.add(key)
                    peer.open.add(peers_key)
                    self.moves += 1
                else:
                    yield
            rank.wants = None
        self.moves += 1
        lane = self.number[rank.number, channel]
        if self.streams is not None:
            lane %= self.streams
        if self.queues is not None:
            lane = (lane + 1) % self.queues
        transfer = Transfer(sends, rank.lanes[lane])
        transfer.lane.append(transfer)
        rank.queues[key].append(transfer)
        rank.stream.append(("start", transfer))
        if self.queues is not None and lane == 0 and not (sends and self.buffers):
            rank.stream.append(("wait", transfer))
        return transfer

    # The GPUs

    def _complete(self, hosts):
        hosts = dict(enumerate(hosts))
        moves = -1
        while self.moves != moves:
            moves = self.moves
            for number in list(hosts):
                self._run_host(hosts, number)
            for rank in self.ranks:
                self._run_stream(rank)
            for rank in self.ranks:
                self._run_queues(rank)
        return not hosts and not any(r.stream or any(r.queues.values()) for r in self.ranks)

    def _run_host(self, hosts, number):
        """Run the host until it blocks or ends."""
        moves = -1
        while self.moves != moves:
            moves = self.moves
            if next(hosts[number], "ended") == "ended":
                del hosts[number]
                return

    def _run_stream(self, rank):
        while rank.stream:
            what, transfer = rank.stream[0]
            if what == "wait" and not transfer.has_ended:
                return
            transfer.can_start = True
            rank.stream.popleft()
            self.moves += 1

    def _run_queues(self, rank):
        for (group, peer), own in rank.queues.items():
            while self.buffers and own and own[0].may_run:
                if own[0].sends:
                    self.ranks[peer].buffered[group, rank.number] += 1
                elif rank.buffered[group, peer]:
                    rank.buffered[group, peer] -= 1
                else:
                    break
                own.popleft().end()
                self.moves += 1
            other = self.ranks[peer].queues[group, rank.number]
            while not self.buffers and own and other and own[0].sends != other[0].sends:
                if not (own[0].may_run and other[0].may_run):
                    break
                own.popleft().end()
                other.popleft().end()
                self.moves += 1
