import torch
import triton
import triton.language as tl


def _traffic(elements, element_bytes, gb_s):
    return 2 * elements * element_bytes / (gb_s * 1e3)


def reads_only(operators, elements, element_bytes, launch_us, gb_s, fused):
    return (1 if fused else operators) * (launch_us + _traffic(elements, element_bytes, gb_s) / 2)


def in_nanoseconds(operators, elements, element_bytes, launch_us, gb_s, fused):
    return (1 if fused else operators) * (launch_us + 2 * elements * element_bytes / gb_s)


def launched_once(operators, elements, element_bytes, launch_us, gb_s, fused):
    return launch_us + (1 if fused else operators) * _traffic(elements, element_bytes, gb_s)


def moved_once(operators, elements, element_bytes, launch_us, gb_s, fused):
    return (1 if fused else operators) * launch_us + _traffic(elements, element_bytes, gb_s)


def the_longer(operators, elements, element_bytes, launch_us, gb_s, fused):
    return (1 if fused else operators) * max(launch_us, _traffic(elements, element_bytes, gb_s))


def never_fused(operators, elements, element_bytes, launch_us, gb_s, fused):
    return operators * (launch_us + _traffic(elements, element_bytes, gb_s))


def one_launch(operators, elements, element_bytes, launch_us, gb_s, fused):
    return launch_us


@triton.jit
def _kernel(x_ptr, weight_ptr, out_ptr, width, eps, MISTAKE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    if MISTAKE == "no mask":
        x = tl.load(x_ptr + row * width + cols)
    elif MISTAKE == "ones":
        x = tl.load(x_ptr + row * width + cols, mask=mask, other=1.0)
    else:
        x = tl.load(x_ptr + row * width + cols, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if MISTAKE == "no weight":
        weight = weight * 0 + 1
    if MISTAKE == "half":
        squares = tl.sum(x * x).to(tl.float32)
        x = x.to(tl.float32)
    else:
        x = x.to(tl.float32)
        if MISTAKE == "mean":
            x = tl.where(mask, x - tl.sum(x) / width, 0.0)
        squares = tl.sum(x * x)
    if MISTAKE == "block":
        rstd = tl.rsqrt(squares / BLOCK + eps)
    elif MISTAKE == "no eps":
        rstd = tl.rsqrt(squares / width)
    elif MISTAKE == "eps outside":
        rstd = 1 / (tl.sqrt(squares / width) + eps)
    else:
        rstd = tl.rsqrt(squares / width + eps)
    tl.store(out_ptr + row * width + cols, (x * rstd * weight).to(out_ptr.dtype.element_ty), mask=mask)


def _with(mistake):
    def norm(x, weight, eps):
        out = torch.empty_like(x)
        block = triton.next_power_of_2(x.shape[1])
        _kernel[(x.shape[0],)](x, weight, out, x.shape[1], eps, MISTAKE=mistake, BLOCK=block)
        return out

    norm.__name__ = mistake.replace(" ", "_")
    return norm


def over_the_whole_matrix(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean() + eps) * weight.float()).to(x.dtype)


def _scale(squares, eps):
    return torch.rsqrt(squares.mean(-1, keepdim=True) + eps)


def gamma_on_rows(x, w, gamma, eps):
    return gamma[:, None] * w, _scale(x.square(), eps)


def gamma_forgotten(x, w, gamma, eps):
    return w, _scale(x.square(), eps)


def statistic_after_gamma(x, w, gamma, eps):
    return w * gamma, _scale((x * gamma).square(), eps)


def mean_of_x(x, w, gamma, eps):
    return w * gamma, _scale(x, eps)


def squared_mean_of_x(x, w, gamma, eps):
    return w * gamma, torch.rsqrt(x.mean(-1, keepdim=True).square() + eps)


def variance(x, w, gamma, eps):
    return w * gamma, torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + eps)


def root_itself(x, w, gamma, eps):
    return w * gamma, 1 / _scale(x.square(), eps)


def sum_of_squares(x, w, gamma, eps):
    return w * gamma, torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


WRONG = {
    "03.1": [
        (reads_only, "its bytes count twice"),
        (in_nanoseconds, "1000 bytes a microsecond"),
        (launched_once, "count its fixed cost each time"),
        (moved_once, "moves the whole tensor again"),
        (the_longer, "the two costs add"),
        (never_fused, "one launch, one read, one write"),
        (one_launch, ""),
    ],
    "03.2": [
        (_with("no eps"), "a row of zeros"),
        (_with("no weight"), "multiply by weight"),
        (_with("mean"), "subtracts no mean"),
        (_with("block"), "not over BLOCK"),
        (_with("no mask"), "read the row below"),
        (_with("ones"), "add something to the sum"),
        (_with("half"), "before you square"),
        (_with("eps outside"), "under the root"),
        (over_the_whole_matrix, ""),
    ],
    "03.3": [
        (gamma_on_rows, "not its rows"),
        (gamma_forgotten, "gamma multiplied in"),
        (statistic_after_gamma, "before gamma"),
        (mean_of_x, "square first"),
        (squared_mean_of_x, "square first"),
        (variance, "LayerNorm's variance"),
        (root_itself, "reciprocal of the root"),
        (sum_of_squares, ""),
    ],
}
