"""What a cast can compute of what it reads, before it casts: GELU, SiLU-and-mul, their gradients;
and of what is stored otherwise than it is cast, the rounding, and dropout's gradient.

In FP32, and rounded in the end, as the operator would have returned it: to the input's type, or to
that in the form's name. The cast is bound by instructions, so what costs many is replaced: erf by a
fraction that is made of the exponential which the gradient needs anyway, tanh by a sigmoid. Both
keep small values exact where the textbook form, 1 + erf or 1 + tanh, cancels.
"""

import triton
import triton.language as tl

# Phi(-z) = exp(-z^2 / 2) t (A1 + t (A2 + ... t A6)) with t = 1 / (1 + P z), z >= 0; fitted for the
# smallest relative error, which is 2e-6 up to z = 9. (BF16 rounds by 2e-3.)
_P = tl.constexpr(0.3)
_A1 = tl.constexpr(0.12032762922694991)
_A2 = tl.constexpr(0.11121137439869963)
_A3 = tl.constexpr(0.15374785729556853)
_A4 = tl.constexpr(-0.03403214978304714)
_A5 = tl.constexpr(0.2305815673788705)
_A6 = tl.constexpr(-0.08183579807190944)
_LOG2_E = tl.constexpr(1.4426950408889634)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
# tanh GELU is x sigmoid(x (_B + _B 0.044715 x^2)).
_B = tl.constexpr(1.5957691216057308)
_C = tl.constexpr(0.044715)

_EX2 = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")
_RCP = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
_TO_BF16 = tl.constexpr("""{
.reg .b32 both;
cvt.rn.bf16x2.f32 both, $3, $2;
shl.b32 $0, both, 16;
and.b32 $1, both, 0xffff0000;
}""")


def is_stored(form: str) -> bool:
    """Is this what takes a tensor from how it is stored to what is cast, and computes little?"""
    return form.startswith(("to_", "dropout"))


@triton.jit
def _exp2(x, PTX: tl.constexpr):
    # Written out, these two are one instruction each; tl.exp2 and a division take three to four.
    if PTX == "":
        return tl.exp2(x)
    return tl.inline_asm_elementwise(_EX2, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _reciprocal(x, PTX: tl.constexpr):
    if PTX == "":
        return 1.0 / x
    return tl.inline_asm_elementwise(_RCP, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _rounded(x, TYPE: tl.constexpr, PTX: tl.constexpr):
    """FP32 values as TYPE holds them."""
    if PTX == "" or TYPE != tl.bfloat16:
        result = x.to(TYPE).to(tl.float32)
    else:
        # Two at once, which the compiler doesn't.
        result = tl.inline_asm_elementwise(
            _TO_BF16, "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    return result


@triton.jit
def _sigmoid(x, PTX: tl.constexpr):
    return _reciprocal(1.0 + _exp2(x * -_LOG2_E, PTX), PTX)


@triton.jit
def _normal(x, PTX: tl.constexpr):
    """Phi(-|x|), and exp(-x^2 / 2)."""
    bell = _exp2(x * x * (-0.5 * _LOG2_E), PTX)
    t = _reciprocal(1.0 + _P * tl.abs(x), PTX)
    below = _A1 + t * (_A2 + t * (_A3 + t * (_A4 + t * (_A5 + t * _A6))))
    return below * (t * bell), bell


@triton.jit
def _activation(x, y, TYPE: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr):
    if FORM == "gelu":
        below, _ = _normal(x, PTX)
        value = tl.maximum(x, 0.0) - tl.abs(x) * below
    elif FORM == "gelu_backward":
        below, bell = _normal(x, PTX)
        value = y * (tl.where(x < 0.0, below, 1.0 - below) + x * bell * _INV_SQRT_2PI)
    elif FORM == "gelu_tanh":
        value = x * _sigmoid(x * (_B + _B * _C * x * x), PTX)
    elif FORM == "gelu_tanh_backward":
        s = _sigmoid(x * (_B + _B * _C * x * x), PTX)
        value = y * (s + x * s * (1.0 - s) * (_B + 3.0 * _B * _C * x * x))
    else:
        tl.static_assert(FORM == "silu_mul")
        value = _rounded(x * _sigmoid(x, PTX), TYPE, PTX) * y
    return _rounded(value, TYPE, PTX)


@triton.jit
def _dropped(x, mask, factor):
    # (Not x or zero: inf times zero is nan, and a negative number times zero is -0.0.)
    return x * tl.where(mask != 0.0, factor, 0.0)


@triton.jit
def formed(x, y, factor, TYPE: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr):
    """What is cast, of FP32 values x and y that were read as TYPE; FORM "" is x itself."""
    if FORM == "":
        value = x
    elif FORM == "to_bf16":
        value = _rounded(x, tl.bfloat16, PTX)
    elif FORM == "to_fp16":
        value = _rounded(x, tl.float16, PTX)
    elif FORM == "dropout":
        value = _rounded(_dropped(x, y, factor), TYPE, PTX)
    elif FORM == "dropout_to_bf16":
        value = _rounded(_dropped(x, y, factor), tl.bfloat16, PTX)
    elif FORM == "dropout_to_fp16":
        value = _rounded(_dropped(x, y, factor), tl.float16, PTX)
    else:
        value = _activation(x, y, TYPE, FORM, PTX)
    return value


@triton.jit
def value_and_grads(
    x, y, grad, TYPE: tl.constexpr, FORM: tl.constexpr, BACKWARD: tl.constexpr, PTX: tl.constexpr
):
    """(form of x and y, its gradients by x and by y) of FP32 values that were read as TYPE.

    `grad` is the gradient of the form; by y it is 0 where the form has no y. BACKWARD is the form
    of the gradient where it is one of x and grad alone.
    """
    if BACKWARD != "":
        value = _activation(x, x, TYPE, FORM, PTX)
        by_x = _activation(x, grad, TYPE, BACKWARD, PTX)
        by_y = 0.0
    else:
        tl.static_assert(FORM == "silu_mul")
        s = _sigmoid(x, PTX)
        silu = _rounded(x * s, TYPE, PTX)
        value = _rounded(silu * y, TYPE, PTX)
        by_y = _rounded(grad * silu, TYPE, PTX)
        by_x = _rounded(_rounded(grad * y, TYPE, PTX) * s * (1.0 + x * (1.0 - s)), TYPE, PTX)
    return value, by_x, by_y
