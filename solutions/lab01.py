"""Worked answers of lab 01."""

from __future__ import annotations


def pin_bandwidth_gb_s(bus_bits, gbit_per_pin):
    """A memory bus's peak bandwidth in GB/s: every pin carries ``gbit_per_pin`` gigabits a second."""
    return bus_bits * gbit_per_pin / 8  # 8 bits a byte


def crossover_tokens(layers, kv_heads, head_dim, weight_bytes, kv_bytes_per_value=2):
    """Cached tokens in the whole batch at which KV traffic equals weight traffic.

    A cached token holds one key and one value vector in every layer and KV head, and is read once a step.
    """
    bytes_per_token = 2 * layers * kv_heads * head_dim * kv_bytes_per_value
    return weight_bytes / bytes_per_token


def decode_tokens_per_s(batch, context, weight_bytes, kv_bytes_per_token, flops_per_token, gb_s, tflop_s):
    """The roofline's bound on the tokens per second of the whole batch.

    A step reads the weights once for all, and each sequence's own ``context`` cached tokens. It cannot end before both
    the bytes have been read and the FLOPs done.
    """
    bytes_per_step = weight_bytes + batch * context * kv_bytes_per_token
    flops_per_step = batch * flops_per_token
    seconds = max(bytes_per_step / (gb_s * 1e9), flops_per_step / (tflop_s * 1e12))
    return batch / seconds
