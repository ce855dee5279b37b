# ruff: noqa: E501 - a table, a line for each operator
"""Every elementwise operator of torch with its arguments, as templates of Python expressions.

In a template {a} {b} {c} are values within [-1, 1], {pos} within [0.5, 2.5], {unit} [-0.8, 0.8],
{big} [-3, 3], {gt1} [1.2, 3.2], {prob} [0.1, 0.9]; {i} {j} whole numbers within 9 as int tensors,
{count} within [1, 9]; {m} {l} masks; {n} a number, {p} a positive one, {k} a small whole one. What
follows: "u:" may be large, "m:" is a mask, "i:" has integers; else it is a float within about 5.
"""

import torch

TABLE = """
add: {a} + {b} | {a} + {n} | {n} + {a} | torch.add({a}, {b}, alpha={n}) | {a}.add({b}, alpha={k}) | {a}.clone().add_({b}, alpha={n}) | torch.add({a}, {n}, alpha={k}) | i:{i} + {j} | {a} + {i} | i:torch.add({i}, {j}, alpha={k})
sub: {a} - {b} | {n} - {a} | torch.sub({a}, {b}, alpha={n}) | {a}.subtract({b}, alpha={n}) | {a}.clone().sub_({b}, alpha={n}) | i:{i} - {j}
rsub: torch.rsub({a}, {b}, alpha={n}) | torch.rsub({a}, {n}) | torch.rsub({a}, {n}, alpha={k})
mul: {a} * {b} | {a} * {n} | {a}.clone().mul_({b}) | torch.multiply({a}, {b}) | i:{i} * {k} | {a} * {i} | {m} * {a}
div: {a} / {pos} | {n} / {pos} | {a} / {n} | torch.div({a}, {pos}, rounding_mode=None) | torch.div({big}, {pos}, rounding_mode="floor") | torch.div({big}, {pos}, rounding_mode="trunc") | torch.divide({big}, {n}, rounding_mode="floor") | {big} // {pos} | {big} // {p} | torch.floor_divide({big}, {pos}) | {i} / {count} | i:{i} // {count} | i:torch.div({i}, {count}, rounding_mode="trunc") | {a}.clone().div_({pos}) | {a}.clone().div_({pos}, rounding_mode="floor")
true_divide: torch.true_divide({a}, {pos})
remainder: torch.remainder({big}, {pos}) | {big} % {p} | {n} % {pos} | torch.remainder({big}, -{p}) | i:{i} % {count} | {big}.clone().remainder_({p})
fmod: torch.fmod({big}, {pos}) | {big}.fmod({p}) | i:torch.fmod({i}, {count})
pow: {pos} ** {a} | {a} ** 2 | {a} ** 3 | {pos} ** {n} | {p} ** {a} | {a}.pow(4) | {pos} ** -1 | {pos} ** 0.5 | {pos} ** -0.5 | {a} ** 0 | {a} ** 1 | {a}.clone().pow_({k}) | torch.pow({p}, {a}) | i:{i} ** 2
float_power: torch.float_power({pos}, {a}).to({a}.dtype) | {pos}.float_power({n}).to({a}.dtype)
square: {a}.square() | torch.square({a})
sqrt: {pos}.sqrt() | {pos}.clone().sqrt_()
rsqrt: {pos}.rsqrt() | torch.rsqrt({pos})
reciprocal: {pos}.reciprocal() | 1 / {pos}
neg: -{a} | torch.neg({a}) | torch.negative({a}) | {a}.clone().neg_() | i:-{i}
positive: +{a} | torch.positive({a})
abs: {a}.abs() | abs({a}) | torch.absolute({a}) | {a}.clone().abs_() | i:{i}.abs()
sign: {a}.sign() * {b} | i:{i}.sign()
sgn: {a}.sgn() * {b}
signbit: m:torch.signbit({a})
copysign: torch.copysign({a}, {b}) | torch.copysign({a}, {n}) | {a}.copysign({b})
exp: {a}.exp() | torch.exp({a}) | {a}.clone().exp_()
exp2: torch.exp2({a}) | torch.special.exp2({a})
expm1: torch.expm1({a}) | torch.special.expm1({a})
log: {pos}.log() | {pos}.clone().log_()
log2: {pos}.log2()
log10: {pos}.log10()
log1p: {pos}.log1p() | torch.log1p({unit})
logaddexp: torch.logaddexp({a}, {b})
logaddexp2: torch.logaddexp2({a}, {b})
xlogy: torch.xlogy({a}, {pos}) | torch.xlogy({a}, {p}) | torch.special.xlogy({pos}, {pos})
special_xlog1py: torch.special.xlog1py({a}, {pos})
special_entr: torch.special.entr({pos})
sin: {big}.sin() | {a}.clone().sin_()
cos: {big}.cos()
tan: {a}.tan()
asin: {unit}.asin() | torch.arcsin({unit})
acos: {unit}.acos() | torch.arccos({unit})
atan: {big}.atan() | torch.arctan({big})
atan2: torch.atan2({a}, {pos}) | torch.arctan2({pos}, {b})
sinh: {a}.sinh()
cosh: {a}.cosh()
asinh: {a}.asinh() | torch.arcsinh({big})
acosh: {gt1}.acosh()
atanh: {unit}.atanh()
sinc: torch.sinc({pos}) | torch.special.sinc({pos})
tanh: {a}.tanh() | torch.tanh({big}) | {a}.clone().tanh_() | F.tanh({a})
sigmoid: {a}.sigmoid() | torch.special.expit({big}) | {a}.clone().sigmoid_() | F.sigmoid({a})
logit: torch.logit({prob}) | torch.logit({prob}, eps=0.2) | torch.special.logit({prob}, eps=0.01) | torch.logit({prob}, 1e-6)
erf: torch.erf({a}) | torch.special.erf({big})
erfc: torch.erfc({a}) | torch.special.erfc({a})
erfinv: torch.erfinv({unit}) | torch.special.erfinv({unit})
special_erfcx: torch.special.erfcx({a})
special_ndtri: torch.special.ndtri({prob})
special_log_ndtr: torch.special.log_ndtr({a})
lgamma: torch.lgamma({pos}) | torch.special.gammaln({pos})
digamma: torch.digamma({pos}) | torch.special.psi({pos})
polygamma: torch.polygamma(1, {pos}) | u:torch.special.polygamma(2, {pos})
mvlgamma: torch.mvlgamma(1.0 + {gt1}, p=2) | torch.special.multigammaln(1.0 + {gt1}, 1)
igamma: torch.igamma({pos}, {pos}) | torch.special.gammainc({p} + 0 * {pos}, {pos})
igammac: torch.igammac({p} + 0 * {pos}, {pos})
special_zeta: torch.special.zeta({gt1} + 1, {p}) | torch.special.zeta({gt1} + 1, {pos})
i0: torch.i0({a}) | torch.special.i0({big})
special_i0e: torch.special.i0e({a})
special_i1: torch.special.i1({a})
special_i1e: torch.special.i1e({a})
special_airy_ai: torch.special.airy_ai({a})
special_bessel_j0: torch.special.bessel_j0({a})
special_bessel_j1: torch.special.bessel_j1({a})
special_bessel_y0: torch.special.bessel_y0({pos})
special_bessel_y1: torch.special.bessel_y1({pos})
special_modified_bessel_i0: torch.special.modified_bessel_i0({a})
special_modified_bessel_i1: torch.special.modified_bessel_i1({a})
special_modified_bessel_k0: torch.special.modified_bessel_k0({pos})
special_modified_bessel_k1: torch.special.modified_bessel_k1({pos})
special_scaled_modified_bessel_k0: torch.special.scaled_modified_bessel_k0({pos})
special_scaled_modified_bessel_k1: torch.special.scaled_modified_bessel_k1({pos})
special_spherical_bessel_j0: torch.special.spherical_bessel_j0({pos})
special_chebyshev_polynomial_t: torch.special.chebyshev_polynomial_t({unit}, {k})
special_chebyshev_polynomial_u: torch.special.chebyshev_polynomial_u({unit}, {k})
special_chebyshev_polynomial_v: torch.special.chebyshev_polynomial_v({unit}, {k})
special_chebyshev_polynomial_w: torch.special.chebyshev_polynomial_w({unit}, {k})
special_shifted_chebyshev_polynomial_t: torch.special.shifted_chebyshev_polynomial_t({prob}, {k})
special_shifted_chebyshev_polynomial_u: torch.special.shifted_chebyshev_polynomial_u({prob}, {k})
special_shifted_chebyshev_polynomial_v: torch.special.shifted_chebyshev_polynomial_v({prob}, {k})
special_shifted_chebyshev_polynomial_w: torch.special.shifted_chebyshev_polynomial_w({prob}, {k})
special_hermite_polynomial_h: u:torch.special.hermite_polynomial_h({unit}, {k})
special_hermite_polynomial_he: torch.special.hermite_polynomial_he({unit}, {k})
special_laguerre_polynomial_l: torch.special.laguerre_polynomial_l({unit}, {k})
special_legendre_polynomial_p: torch.special.legendre_polynomial_p({unit}, {k})
deg2rad: torch.deg2rad(40 * {a})
rad2deg: 0.02 * torch.rad2deg({a})
angle: torch.angle({a}) * {b}
_conj_physical: torch.ops.aten._conj_physical({a})
conj_physical: torch.conj_physical({a}) | {a}.conj() | torch.real({a})
clone: {a}.clone() | {a}.contiguous()
floor: {big}.floor() | {big}.clone().floor_()
ceil: {big}.ceil() | torch.ceil({big})
round: {big}.round() | torch.round({a}, decimals=1) | torch.round(40 * {a}, decimals=-1) * 0.1 | {big}.clone().round_()
trunc: {big}.trunc() | torch.fix({big})
frac: {big}.frac() | torch.frac({big})
frexp: torch.frexp({pos})[0] | i:torch.frexp({big})[1]
ldexp: torch.ldexp({a}, {i}.clamp(-2, 2)) | torch.ldexp({a}, torch.tensor(1)) | {a}.clone().ldexp_({count}.clamp(max=2)) | u:torch.ldexp({a}, {b})
nextafter: torch.nextafter({a}, {b})
hypot: torch.hypot({pos}, {b})
lerp: torch.lerp({a}, {b}, {n}) | torch.lerp({a}, {b}, {c}) | {a}.clone().lerp_({b}, {n})
addcmul: torch.addcmul({a}, {b}, {c}, value={n}) | torch.addcmul({a}, {b}, {c}) | {a}.clone().addcmul_({b}, {c}, value={k})
addcdiv: torch.addcdiv({a}, {b}, {pos}, value={n}) | torch.addcdiv({a}, {b}, {pos}) | {a}.clone().addcdiv_({b}, {pos}, value={n})
clamp: {a}.clamp(-0.3, 0.6) | torch.clamp({a}, min={n}) | torch.clamp({a}, max={n}) | torch.clamp({a}, min={b}) | torch.clamp({a}, {b}, {c}) | {a}.clone().clamp_(max=0.4) | i:{i}.clamp(-2, 5) | torch.clamp({a}, 0.5, -0.5)
clip: torch.clip({a}, -0.2, 0.3) | {a}.clip(max={b})
clamp_min: torch.clamp_min({a}, {n}) | {a}.clamp_min({b})
clamp_max: torch.clamp_max({a}, {n}) | {a}.clamp_max({b})
maximum: torch.maximum({a}, {b})
minimum: torch.minimum({a}, {b})
max: torch.max({a}, {b})
min: torch.min({a}, {b})
fmax: torch.fmax({a}, {b})
fmin: torch.fmin({a}, {b})
nan_to_num: torch.nan_to_num({a}) | torch.nan_to_num(({a} - 0.2).log(), nan={n}) | torch.nan_to_num({a} / {a}.floor(), nan=0.3, posinf=1.5, neginf=-1.5)
heaviside: torch.heaviside({a}, {b}) * {c}
where: torch.where({m}, {a}, {b}) | torch.where({m}, {a}, {n}) | torch.where({m}, {n}, {a}) | {a}.where({m}, {b}) | torch.where({m}, {a}, {i}) | torch.where({m}, {n}, {k}) * {a} | i:torch.where({m}, {i}, {j})
masked_fill: {a}.masked_fill({m}, {n}) | {a}.clone().masked_fill_({m}, {n}) | {a}.masked_fill({m}, torch.tensor({n})) | i:{i}.masked_fill({m}, 2)
eq: m:{i} == {j} | m:{a}.eq({b}.floor()) | m:{i} == 2 | m:{m} == {l}
ne: m:{i} != {j} | m:torch.ne({i}, 1) | m:torch.not_equal({a}, {a}.floor())
lt: m:{a} < {b} | m:{a} < {n} | m:{n} < {a} | m:torch.less({a}, {b}) | m:{i} < {j}
le: m:{a} <= {b} | m:{a}.le({n}) | m:torch.less_equal({i}, {j})
gt: m:{a} > {b} | m:{a} > {n} | m:torch.greater({a}, {b}) | m:{m} > {l}
ge: m:{a} >= {b} | m:{a}.ge({n}) | m:{i} >= 2
isclose: m:torch.isclose({i} * 0.1, {j} * 0.1) | m:torch.isclose({a}, {b}, atol=0.3)
isnan: m:torch.isnan(({a} - 0.3).log())
isinf: m:torch.isinf(1 / {i})
isfinite: m:torch.isfinite(({a} - 0.3).log())
isneginf: m:torch.isneginf(-1.0 / {i}.abs())
isposinf: m:torch.isposinf(1.0 / {i}.abs())
isreal: m:torch.isreal({a})
logical_and: m:torch.logical_and({m}, {l}) | m:torch.logical_and({i}, {j}) | m:torch.logical_and({a}, {m})
logical_or: m:torch.logical_or({m}, {l}) | m:torch.logical_or({i}, {m})
logical_xor: m:torch.logical_xor({m}, {l}) | m:torch.logical_xor({i}, {j})
logical_not: m:torch.logical_not({m}) | m:torch.logical_not({i}) | m:torch.logical_not({a}.floor())
bitwise_and: m:{m} & {l} | i:{i} & {j} | i:{i} & 3 | i:torch.bitwise_and({i}, {m})
bitwise_or: m:{m} | {l} | i:torch.bitwise_or({i}, {j})
bitwise_xor: m:{m} ^ {l} | i:{i} ^ {j} | m:torch.bitwise_xor({m}, True)
bitwise_not: m:~{m} | i:~{i}
bitwise_left_shift: i:{count} << 1 | i:torch.bitwise_left_shift({count}, {k})
bitwise_right_shift: i:{count} >> 1 | i:torch.bitwise_right_shift({i}, {k})
__lshift__: i:{count}.__lshift__(1)
__rshift__: i:{i}.__rshift__(1)
__xor__: i:{i}.__xor__({j})
__ilshift__: i:{count}.clone().__ilshift__(1)
__ixor__: i:{i}.clone().__ixor__({j})
gcd: i:torch.gcd({i}, {count})
lcm: i:torch.lcm({count}, {k} + 0 * {count})
relu: torch.relu({a}) | F.relu({a}) | {a}.clone().relu_() | F.relu({a}.clone(), inplace=True)
relu6: F.relu6(6 + {big}) | F.relu6({a})
rrelu: F.rrelu({a}, training=False) | F.rrelu({a}, 0.1, 0.5)
leaky_relu: F.leaky_relu({a}, {p}) | F.leaky_relu({a}) | F.leaky_relu({a}.clone(), 0.3, inplace=True)
prelu: torch.where({a} > 0, {a}, {b} * {a})
elu: F.elu({a}) | F.elu({a}, alpha={p}) | F.elu({a}, {p}, inplace=False)
celu: F.celu({a}, alpha={p}) | torch.celu({a})
selu: F.selu({a}) | torch.selu({a})
gelu: F.gelu({a}) | F.gelu({big}, approximate="tanh") | F.gelu({a}, approximate="none")
silu: F.silu({a}) | F.silu({a}.clone(), inplace=True)
mish: F.mish({a})
softplus: F.softplus({a}) | F.softplus({big}, beta={p}) | F.softplus({big}, beta=2.0, threshold=1.0)
softsign: F.softsign({a})
softshrink: F.softshrink({a}) | F.softshrink({a}, lambd=0.2)
hardshrink: F.hardshrink({a}, lambd=0.3) | torch.hardshrink({a})
tanhshrink: F.tanhshrink({a})
hardtanh: F.hardtanh({a}, -0.4, 0.6) | F.hardtanh({big}) | F.hardtanh({a}, min_val=-0.2)
hardsigmoid: F.hardsigmoid(3 * {big}) | F.hardsigmoid({a})
hardswish: F.hardswish(2 * {big}) | F.hardswish({a}) | torch.nn.Hardswish()({a})
threshold: F.threshold({a}, {n}, {n}) | F.threshold({a}, 0.1, -0.5) | torch.threshold({a}, 0.2, 0.7)
logsigmoid: F.logsigmoid({a})
losses: F.mse_loss({a}, {b}, reduction="none") | F.smooth_l1_loss({a}, {b}, reduction="none", beta={p}) | F.huber_loss({a}, {b}, reduction="none", delta={p}) | F.l1_loss({a}, {b}, reduction="none") | F.binary_cross_entropy_with_logits({a}, {prob}, reduction="none")
tanh_backward: torch.ops.aten.tanh_backward({a}, {b})
sigmoid_backward: torch.ops.aten.sigmoid_backward({a}, {b})
threshold_backward: torch.ops.aten.threshold_backward({a}, {b}, {n})
gelu_backward: torch.ops.aten.gelu_backward({a}, {b}) | torch.ops.aten.gelu_backward({a}, {b}, approximate="tanh")
silu_backward: torch.ops.aten.silu_backward({a}, {b})
logit_backward: torch.ops.aten.logit_backward({a}, {prob}, 0.2)
native_dropout_backward: torch.ops.aten.native_dropout_backward({a}, {m}, {p})
casts: {a}.int().float() | {big}.long().to({a}.dtype) | {big}.int() * {b} | {a}.bool() * {b} | {a}.half().to({a}.dtype) | {a}.bfloat16().float() | {a}.double().to({a}.dtype) | {a}.to(torch.float64).float() | {big}.to(torch.int16).to({a}.dtype) | {big}.to(torch.int8) * {a} | {big}.to(torch.uint8).float() * 0.01 | {a}.to(torch.float16) * {b} | {a}.type(torch.bfloat16).type_as({b}) | {big}.char() * {a} | {a}.to(torch.bool).to({a}.dtype) | {big}.short() / 3 | {a}.type_as({b}) | {a}.to({b}) | {a}.float() | {m}.float() - 0.5 | {m}.int() * {a} | {m}.to({a}.dtype) * {b} | {a}.to(torch.float8_e4m3fn).to({a}.dtype) | {big}.int().half().to({a}.dtype) | torch.add({a}.half(), {b}.half()).float() | {i}.sqrt().nan_to_num()
dtypes: {a} + torch.tensor({n}, dtype=torch.float64) | {a} * torch.tensor({k}) | {a} + torch.ones_like({a}, dtype=torch.float64).to({a}.dtype) | torch.full_like({a}, {n}, dtype=torch.int32) * {a} | {a} * torch.zeros_like({a}, dtype=torch.bool) + {b} | torch.scalar_tensor({n}, dtype=torch.float16).to({a}.dtype) * {a} | torch.full_like({i}, {k}) * {a} | torch.ones_like({m}) * {a} | {a}.new_full({a}.shape, {n}) * {b} | {a}.new_tensor({n}) * {b} | torch.full({a}.shape, {n}) * {a} | torch.as_tensor({n}) + {a} | True * {a} | torch.tensor(True) * {a} | torch.zeros({a}.shape, dtype={a}.dtype) + {a} | {a}.new_ones(()) * {b} | torch.empty_like({a}).fill_({n}) * {b} | torch.zeros_like({a}).copy_({b}) | torch.zeros_like({i}).copy_({big}) * {a} | {a}.clone().fill_({n}) * {b} | {a}.clone().zero_() + {b}
shapes: {a} * (1.0 / {a}.shape[-1]) | {a} / {a}.size(-1) | {a} * (0.1 * {a}.dim()) | {a} * (1.0 / {a}.numel()) | {a} * (0.01 * len({a})) | {a} * (1.0 / {a}.shape[0]) | torch.ones({a}.shape[-1]) * {a} | {a}.unsqueeze(-1).squeeze(-1) | {a}.view({a}.shape) | {a}.reshape({a}.shape) | {a}.expand_as({b}) | {a}.view_as({b})
derivatives: {a}.detach() | {a}.detach() * {b} | Scale.apply({a}) | Scale.apply({a} * {b}) | StraightThrough.apply({a}) | {a} + ({b} - {a}).detach() | ({a}.sign() - {a}).detach() + {a} | Twice.apply({a}, {b}) | {a}.data * {b} | Scale.apply({a}).detach() + {b}
"""

# not elementwise, or not a function of its inputs: these must be refused
REFUSED_TABLE = """
not_elementwise: {a} + {b}.sum() | {a}.cumsum(-1) | {a}.softmax(-1) | {a}.flip(-1) | {a}.roll(1, -1) | {a} + {b}.mean() | {a}.sort(-1).values | F.normalize({a}, dim=-1) | F.layer_norm({a}, {a}.shape[-1:]) | {a} * {b}.amax(-1, keepdim=True) | {a} + {b}[..., :1] | {a} * torch.arange({a}.shape[-1]) | torch.stack([{a}, {b}]).sum(0) | {a} * {b}.norm() | {a} * {b}.std()
random: {a} + torch.rand_like({b}) | F.dropout({a}, 0.5) | {a} * torch.bernoulli({prob}) | F.rrelu({a}, training=True) | torch.normal({a}, 1.0) | {a} + torch.randn({a}.shape)
equal: {a} * torch.equal({b}, {c})
data: {a} * {b}.flatten()[0].item() | {a} * float({b}.flatten()[0]) | ({a} if {b}.flatten()[0] > 0 else {b}) | {a} * {b}.tolist()[0][0] | {a} + torch.from_numpy({b}.detach().numpy())
"""


def _read(text: str) -> dict[str, list[str]]:
    rows = (line.split(":", 1) for line in text.strip().splitlines())
    # "|" is an operator of masks, too: only what stands between blanks and begins anew divides
    return {name: [one.strip() for one in _split(rest)] for name, rest in rows}


def _split(text: str) -> list[str]:
    parts = text.split(" | ")
    found: list[str] = []
    for part in parts:
        if found and found[-1].count("{m}") == 1 and part == "{l}":
            found[-1] += " | " + part
        else:
            found.append(part)
    return found


OPERATORS = _read(TABLE)
NEVER = _read(REFUSED_TABLE)


def missing() -> list[str]:
    """The operators that torch tags pointwise and that no template uses."""
    tagged = set()
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        if space == "aten":
            name, _, overload = name.partition(".")
            packet = getattr(torch.ops.aten, name)
            if torch.Tag.pointwise in getattr(packet, overload or "default").tags:
                tagged.add(name)
    known = {*OPERATORS, *NEVER}
    return sorted(
        name for name in tagged
        if name not in known and name.removesuffix("_") not in known
    )  # fmt: skip
