"""`pipeline.vocabulary: "auto"` with schedule `auto`: whether the vocabulary is cut.

It is cut where the simulated step is shorter, within the memory limit: the best named schedule on
the best cut with the head in the last stage is compared with the same for a vocabulary cut over
the pipeline ranks. All times are those of the fixed table, so a plan and its run agree.
"""

import math
from dataclasses import replace

from pipemega.config import Config
from pipemega.errors import PipemegaError
from pipemega.pipeline.module import PipelineModule
from pipemega.planning.meta_model import MetaModel
from pipemega.planning.rates import Rates
from pipemega.planning.schedule_choice import ScheduleChooser

# The stages of a cut vocabulary are not measured: it must win more than this share of the time.
_LEAST_WIN = 0.1


def with_cut_vocabulary(config: Config, net: PipelineModule) -> Config | None:
    """Return `config` with a cut vocabulary in place of "auto"; None: the run cannot have it."""
    section = config.pipeline
    if section.vocabulary != "auto" or section.optimizer_sync != "fenced":
        return None
    if net.vocabulary is None or config.lora is not None or isinstance(section.partition, tuple):
        return None
    optimizer = "" if config.optimizer is None else config.optimizer.type.lower()
    if optimizer.endswith("lamb"):
        return None
    return config.model_copy(
        update={"pipeline": section.model_copy(update={"vocabulary": "parallel"})}
    )


def cut_wins(whole: MetaModel, cut: Config, num_microbatches: int) -> tuple[bool, str]:
    """Return whether the step of `cut` is shorter, and the two times as text.

    Args:
        whole: the model with its head in the last stage.
        cut: the config with a cut vocabulary.
    """
    layers, ranks = whole.layer_costs.total, whole.num_ranks
    if layers[-1] * ranks <= (1 + _LEAST_WIN) * sum(layers):
        return False, f"the head takes at most {1 + _LEAST_WIN:.2g} times the mean work of a rank"
    section = cut.pipeline
    try:
        other = whole.with_config(cut)
        stage, parallel = (
            ScheduleChooser(
                model, section, num_microbatches, Rates(layers=model.layer_costs), quick=True
            ).choose()
            for model in (whole, other)
        )
    except PipemegaError as error:
        return False, str(error)
    times = [choice.prediction.timeline.makespan for choice in (stage, parallel)]
    text = f"the simulated step takes {times[1] / times[0]:.2f} times as long with 'parallel'"
    limit = stage.limit
    if limit.total is not None:
        # Without a limit of the user the whole memory counts: what S keeps for T is less than what
        # a smaller head and embedding save.
        limit = replace(limit, activations=math.inf)
    if not limit.keeps(parallel.prediction):
        return False, f"{text}, and needs more memory than the limit"
    return times[1] < (1 - _LEAST_WIN) * times[0], text
