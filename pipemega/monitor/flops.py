"""FLOPs of a model, and the peak FLOP/s of devices."""

# Peak of dense bf16 matrix products in TFLOP/s, from the manufacturers' data sheets, by a part of
# torch.cuda.get_device_name(). The first match counts, so more specific names come first.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("MIG", 0.0),  # part of a device; its name does not give its FLOP/s
    ("A100", 312.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H200 NVL", 835.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("B200", 2250.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device in TFLOP/s; None if it is not in the table.

    For an unknown device no MFU is reported, unless `monitor.peak_tflops` gives its peak.
    """
    for part, peak in PEAK_TFLOPS:
        if part in device_name:
            return peak or None
    return None


def gpt_flops_per_token(
    *,
    num_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    ffn_hidden_size: int,
    seq_length: int,
    vocab_size: int,
    num_query_groups: int | None = None,
    kv_channels: int | None = None,
    swiglu: bool = False,
) -> float:
    """Return the model FLOPs of forward and backward per token of a GPT.

    A product of [m, k] and [k, n] takes 2mkn; backward computes two such products (gradients of
    input and weight), hence 6 per weight and token:

        6 * ( L * ( h (q + 2 g) + q h        query, key, value; output
                  + q s                      scores and weighted values, 2 * q * s/2: causal
                  + (2 or 3) h f )           feed-forward; 3 with SwiGLU's gate
            + h V )                          head, tied or not

    with q = heads * channels, g = query groups * channels, f = ffn_hidden_size.  Embeddings,
    norms and the recomputation of activation checkpointing are not counted.

    Args:
        ffn_hidden_size: hidden width of the feed-forward block; with SwiGLU, of one half.
        vocab_size: rows of the head.  Megatron counts the padded ones.
        num_query_groups: heads of key and value; None: as many as of query.
        kv_channels: size of one head; None: hidden_size / num_attention_heads.

    Source: Narayanan et al. 2021, arXiv:2104.04473, appendix; with the causal half and grouped
    queries as Megatron-LM counts them today.
    """
    channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
    groups = num_attention_heads if num_query_groups is None else num_query_groups
    query, key = channels * num_attention_heads, channels * groups
    projections = hidden_size * (query + 2 * key) + query * hidden_size
    feed_forward = (3 if swiglu else 2) * hidden_size * ffn_hidden_size
    layer = projections + query * seq_length + feed_forward
    return 6.0 * (num_layers * layer + hidden_size * vocab_size)


def tflops_per_device(flops: float, seconds: float, num_devices: int) -> float:
    """Return the TFLOP/s per device from the FLOPs and seconds of a whole step."""
    return flops / seconds / num_devices / 1e12
