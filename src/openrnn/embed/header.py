"""The C header of an exported layer."""

from collections.abc import Sequence

from openrnn.embed.names import member
from openrnn.spec import Spec

_TEXT = """/* {title}
 * Made by openrnn.export_native for {cpu}. Link with {name}.o.
 *
 * {name}_t is memory of the caller: states, then scratch memory, at any address, which may change
 * between calls. Nothing here allocates or locks. It calls of the C library: {calls}.
 * sched_yield is never called, but the linker must find it. Two threads must not use one
 * {name}_t at the same time. On an older processor it ends with an illegal instruction.
 */
#ifndef {guard}
#define {guard}

#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

enum {{ {name}_INPUTS = {inputs}, {name}_OUTPUTS = {outputs}, {name}_LAYERS = {layers} }};

typedef struct {{
{states}
    unsigned char work[{work}];
}} {name}_t;

/* All states become 0. The rest of the memory may hold anything. */
void {name}_reset({name}_t *state);

/* n steps, none where n is 0 or less: x [n][{inputs}] -> y [n][{outputs}].
 * x and y must not overlap. */
void {name}_step({name}_t *state, const {real} *x, {real} *y, int64_t n);

#ifdef __cplusplus
}}
#endif

#endif
"""


def header(
    name: str, title: str, spec: Spec, real: str, work: int, cpu: str, calls: Sequence[str]
) -> str:
    """The text.

    Args:
        name: what all its names begin with; title: what the layer is.
        real: "float" or "double"; work: bytes of scratch memory; calls: functions of the C library.
    """
    states = "\n".join(
        f"    {real} {member(state)}[{spec.chains}][{width}];"
        for state, width in zip(spec.states, spec.state_sizes)
    )
    return _TEXT.format(
        title=title.replace("*/", "* /"), cpu=cpu, calls=", ".join(calls) or "nothing", name=name,
        guard=f"OPENRNN_{name}_H", inputs=spec.input_size, outputs=spec.output_size,
        layers=spec.num_layers, states=states, work=work, real=real,
    )  # fmt: skip
