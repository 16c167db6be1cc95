def bytes_over_ms(bytes_moved, microseconds):
    return bytes_moved / (microseconds * 1e-3) / 1e9


def in_gib(bytes_moved, microseconds):
    return bytes_moved / (microseconds * 1e-6) / 2**30


def bytes_per_second(bytes_moved, microseconds):
    return bytes_moved / (microseconds * 1e-6)


def bytes_per_us(bytes_moved, microseconds):
    return bytes_moved / microseconds


def upside_down(bytes_moved, microseconds):
    return microseconds / bytes_moved * 1e-3


def product(bytes_moved, microseconds):
    return bytes_moved * microseconds


def no_wait(gpu, launch, warmup, repeats):
    for _ in range(warmup):
        launch()
    gpu.synchronize()
    start = gpu.now()
    for _ in range(repeats):
        launch()
    return (gpu.now() - start) / repeats


def no_warm_up(gpu, launch, warmup, repeats):
    start = gpu.now()
    for _ in range(repeats):
        launch()
    gpu.synchronize()
    return (gpu.now() - start) / repeats


def queued_warm_up(gpu, launch, warmup, repeats):
    for _ in range(warmup):
        launch()
    start = gpu.now()
    for _ in range(repeats):
        launch()
    gpu.synchronize()
    return (gpu.now() - start) / repeats


def waits_each_time(gpu, launch, warmup, repeats):
    for _ in range(warmup):
        launch()
    gpu.synchronize()
    start = gpu.now()
    for _ in range(repeats):
        launch()
        gpu.synchronize()
    return (gpu.now() - start) / repeats


def total(gpu, launch, warmup, repeats):
    for _ in range(warmup):
        launch()
    gpu.synchronize()
    start = gpu.now()
    for _ in range(repeats):
        launch()
    gpu.synchronize()
    return gpu.now() - start


def zero(gpu, launch, warmup, repeats):
    return 0.0


def with_prompt(next_logits, ids, max_tokens):
    ids = list(ids)
    for _ in range(max_tokens):
        ids.append(int(next_logits(ids).argmax()))
    return ids


def never_appends(next_logits, ids, max_tokens):
    return [int(next_logits(list(ids)).argmax()) for _ in range(max_tokens)]


def tensors(next_logits, ids, max_tokens):
    ids, new = list(ids), []
    for _ in range(max_tokens):
        new.append(next_logits(ids).argmax())
        ids.append(int(new[-1]))
    return new


def into_the_prompt(next_logits, ids, max_tokens):
    new = []
    for _ in range(max_tokens):
        new.append(int(next_logits(ids).argmax()))
        ids.append(new[-1])
    return new


def second_best(next_logits, ids, max_tokens):
    ids, new = list(ids), []
    for _ in range(max_tokens):
        new.append(int(next_logits(ids).topk(2).indices[1]))
        ids.append(new[-1])
    return new


WRONG = {
    "00.1": [
        (bytes_over_ms, "microseconds are 1e-6 s"),
        (in_gib, "2**30 bytes are a GiB"),
        (bytes_per_second, "scale it to GB/s"),
        (bytes_per_us, "scale it to GB/s"),
        (upside_down, "bytes divided by time"),
        (product, ""),
    ],
    "00.2": [
        (no_wait, "the cost of launching"),
        (no_warm_up, "includes the first launch"),
        (queued_warm_up, "still queued when your clock started"),
        (waits_each_time, "wait after every launch"),
        (total, "divide by `repeats`"),
        (zero, ""),
    ],
    "00.3": [
        (with_prompt, "only the new tokens"),
        (never_appends, "append each new token"),
        (tensors, "must be an int"),
        (into_the_prompt, "belongs to the caller"),
        (second_best, ""),
    ],
}
