def in_bits(bus_bits, gbit_per_pin):
    return bus_bits * gbit_per_pin


def both_edges(bus_bits, gbit_per_pin):
    return 2 * bus_bits * gbit_per_pin / 8


def bytes_only(bus_bits, gbit_per_pin):
    return bus_bits / 8


def keys_only(layers, kv_heads, head_dim, weight_bytes, kv_bytes_per_value=2):
    return weight_bytes / (layers * kv_heads * head_dim * kv_bytes_per_value)


def one_layer(layers, kv_heads, head_dim, weight_bytes, kv_bytes_per_value=2):
    return weight_bytes / (2 * kv_heads * head_dim * kv_bytes_per_value)


def always_two_bytes(layers, kv_heads, head_dim, weight_bytes, kv_bytes_per_value=2):
    return weight_bytes / (2 * layers * kv_heads * head_dim * 2)


def inverted(layers, kv_heads, head_dim, weight_bytes, kv_bytes_per_value=2):
    return 2 * layers * kv_heads * head_dim * kv_bytes_per_value / weight_bytes


def no_head_dim(layers, kv_heads, head_dim, weight_bytes, kv_bytes_per_value=2):
    return weight_bytes / (2 * layers * kv_heads * kv_bytes_per_value)


def _seconds(bytes_per_step, flops, gb_s, tflop_s):
    return max(bytes_per_step / (gb_s * 1e9), flops / (tflop_s * 1e12))


def steps(batch, context, weight_bytes, kv_bytes_per_token, flops_per_token, gb_s, tflop_s):
    return 1 / _seconds(weight_bytes + batch * context * kv_bytes_per_token, batch * flops_per_token, gb_s, tflop_s)


def weights_each(batch, context, weight_bytes, kv_bytes_per_token, flops_per_token, gb_s, tflop_s):
    return batch / _seconds(
        batch * (weight_bytes + context * kv_bytes_per_token), batch * flops_per_token, gb_s, tflop_s
    )


def one_cache(batch, context, weight_bytes, kv_bytes_per_token, flops_per_token, gb_s, tflop_s):
    return batch / _seconds(weight_bytes + context * kv_bytes_per_token, batch * flops_per_token, gb_s, tflop_s)


def memory_only(batch, context, weight_bytes, kv_bytes_per_token, flops_per_token, gb_s, tflop_s):
    return batch / ((weight_bytes + batch * context * kv_bytes_per_token) / (gb_s * 1e9))


def in_giga(batch, context, weight_bytes, kv_bytes_per_token, flops_per_token, gb_s, tflop_s):
    return batch / ((weight_bytes + batch * context * kv_bytes_per_token) / gb_s)


def _two(batch, context, weight_bytes, kv_bytes_per_token, flops_per_token, gb_s, tflop_s):
    moved = weight_bytes + batch * context * kv_bytes_per_token
    return moved / (gb_s * 1e9), batch * flops_per_token / (tflop_s * 1e12)


def shorter(batch, context, weight_bytes, kv_bytes_per_token, flops_per_token, gb_s, tflop_s):
    return batch / min(_two(batch, context, weight_bytes, kv_bytes_per_token, flops_per_token, gb_s, tflop_s))


def both(batch, context, weight_bytes, kv_bytes_per_token, flops_per_token, gb_s, tflop_s):
    return batch / sum(_two(batch, context, weight_bytes, kv_bytes_per_token, flops_per_token, gb_s, tflop_s))


def zero(batch, context, weight_bytes, kv_bytes_per_token, flops_per_token, gb_s, tflop_s):
    return "fast"


WRONG = {
    "01.1": [(in_bits, "a byte has 8 bits"), (both_edges, "no factor 2"), (bytes_only, "")],
    "01.2": [
        (keys_only, "a key and a value"),
        (one_layer, "multiply by the layers"),
        (always_two_bytes, "do not fix them at 2"),
        (inverted, "upside down"),
        (no_head_dim, ""),
    ],
    "01.3": [
        (in_giga, "the units are off"),
        (shorter, "the shorter of the two"),
        (both, "not their sum"),
        (steps, "one token to each sequence"),
        (weights_each, "once a step for the whole batch"),
        (one_cache, "its own cache"),
        (memory_only, "the longer of the two"),
        (zero, ""),
    ],
}
