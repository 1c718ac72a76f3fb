"""Memory traffic read off the text of a compiled program."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.hlo import cycles, kernels, traffic

MODULE = """
%fused_slice (p0: f32[8,4], p1: s32[]) -> bf16[4] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %slice = f32[1,4]{1,0} dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,4}
  %view = f32[4]{0} bitcast(%slice)
  ROOT %convert = bf16[4]{0} convert(%view)
}

%fused_update (p0.1: bf16[8,4], p1.1: bf16[4], p2.1: s32[]) -> bf16[8,4] {
  %p0.1 = bf16[8,4]{1,0} parameter(0)
  %p1.1 = bf16[4]{0} parameter(1)
  %p2.1 = s32[] parameter(2)
  %row = bf16[1,4]{1,0} bitcast(%p1.1)
  ROOT %update = bf16[8,4]{1,0} dynamic-update-slice(%p0.1, %row, %p2.1)
}

%body (state: (s32[], f32[8,4], bf16[8,4])) -> (s32[], f32[8,4], bf16[8,4]) {
  %state = (s32[], f32[8,4]{1,0}, bf16[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %xs = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %ys = bf16[8,4]{1,0} get-tuple-element(%state), index=2
  %row.1 = bf16[4]{0} fusion(%xs, %i), kind=kLoop, calls=%fused_slice
  %next = bf16[8,4]{1,0} fusion(%ys, %row.1, %i), kind=kLoop, calls=%fused_update
  ROOT %after = (s32[], f32[8,4]{1,0}, bf16[8,4]{1,0}) tuple(%i, %xs, %next)
}

%condition (state.1: (s32[], f32[8,4], bf16[8,4])) -> pred[] {
  %state.1 = (s32[], f32[8,4]{1,0}, bf16[8,4]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (x: f32[8,4], y: bf16[8,4]) -> bf16[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %y = bf16[8,4]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %copy = f32[8,4]{1,0} copy(%x)
  %start = (s32[], f32[8,4]{1,0}, bf16[8,4]{1,0}) tuple(%zero, %copy, %y)
  %loop = (s32[], f32[8,4]{1,0}, bf16[8,4]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"8"}}
  ROOT %out = bf16[8,4]{1,0} get-tuple-element(%loop), index=2
}
"""


def test_loops_count_as_often_as_they_go_round_and_slices_for_what_they_are():
    moved = {kernel.instruction.name: (kernel.times, kernel.bytes) for kernel in kernels(MODULE)}
    assert moved == {
        "copy": (1, 2 * 8 * 4 * 4),
        "row.1": (8, 4 * 4 + 4 + 4 * 2),  # A row of float32, the index, and the row in bfloat16.
        "next": (8, 4 * 2 + 4 + 4 * 2),
    }
    assert traffic(MODULE) == 256 + 8 * 28 + 8 * 20


def test_of_branches_the_one_that_moves_most_counts():
    branches = """
%small (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  ROOT %same = f32[2]{0} copy(%a)
}

%large (b: f32[2]) -> f32[2] {
  %b = f32[2]{0} parameter(0)
  %once = f32[2]{0} copy(%b)
  ROOT %twice = f32[2]{0} copy(%once)
}

ENTRY %main (p: pred[], x: f32[2]) -> f32[2] {
  %p = pred[] parameter(0)
  %x = f32[2]{0} parameter(1)
  ROOT %out = f32[2]{0} conditional(%p, %x, %x), true_computation=%small, false_computation=%large
}
"""
    assert traffic(branches) == 2 * 16


def test_of_what_elementwise_code_slices_a_slice_is_read():
    gate = """
%fused_gate (p0: bf16[2,8], p1: bf16[2,8], p2: f32[2]) -> f32[2,4] {
  %p0 = bf16[2,8]{1,0} parameter(0)
  %p1 = bf16[2,8]{1,0} parameter(1)
  %p2 = f32[2]{0} parameter(2)
  %sum = bf16[2,8]{1,0} add(%p0, %p1)
  %first = bf16[2,4]{1,0} slice(%sum), slice={[0:2], [0:4]}
  %wide = f32[2,4]{1,0} convert(%first)
  %scale = f32[2,4]{1,0} broadcast(%p2), dimensions={0}
  ROOT %scaled = f32[2,4]{1,0} multiply(%wide, %scale)
}

ENTRY %main (x: bf16[2,8], y: bf16[2,8], z: f32[2]) -> f32[2,4] {
  %x = bf16[2,8]{1,0} parameter(0)
  %y = bf16[2,8]{1,0} parameter(1)
  %z = f32[2]{0} parameter(2)
  ROOT %out = f32[2,4]{1,0} fusion(%x, %y, %z), kind=kLoop, calls=%fused_gate
}
"""
    assert traffic(gate) == 2 * (8 * 2) + 2 * 4 + 8 * 4  # Half of each summand, the scales, and the result.


def test_what_runs_beside_others_counts_once():
    """As XLA writes for a GPU from jax 0.12 on: the shape of a start holds the operands as well."""
    beside = MODULE.replace(
        "%row.1 = bf16[4]{0} fusion(%xs, %i), kind=kLoop, calls=%fused_slice",
        "%begun = ((f32[8,4]{1,0}, s32[]), bf16[4]{0}, u32[]) fusion-start(%xs, %i), kind=kLoop, calls=%fused_slice\n"
        "  %row.1 = bf16[4]{0} fusion-done(%begun)",
    )
    assert beside != MODULE
    assert traffic(beside) == traffic(MODULE)


def test_a_copy_that_runs_beside_others_reads_and_writes():
    copy = """
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %begun = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%x)
  ROOT %out = f32[8]{0} copy-done(%begun)
}
"""
    assert traffic(copy) == 2 * 32


def test_on_a_tpu_what_stays_on_the_chip_does_not_count_and_cycles_do():
    on_chip = """
%fused (p0: f32[8], p1: f32[8]) -> f32[8] {
  %p0 = f32[8]{0:T(128)S(1)} parameter(0)
  %p1 = f32[8]{0:T(128)} parameter(1)
  ROOT %sum = f32[8]{0:T(128)} add(%p0, %p1)
}

ENTRY %main (x: f32[16], y: f32[8]) -> f32[8] {
  %x = f32[16]{0:T(128)} parameter(0)
  %y = f32[8]{0:T(128)} parameter(1)
  %begun = ((f32[16]{0:T(128)}), f32[8]{0:T(128)S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:8]}
  %near = f32[8]{0:T(128)S(1)} slice-done(%begun)
  %sum.1 = f32[8]{0:T(128)S(1)} fusion(%near, %y), kind=kLoop, calls=%fused, \
backend_config={"estimated_cycles":"100","iteration_bounds":["1"]}
  ROOT %out = f32[8]{0:T(128)} copy(%sum.1), backend_config={"estimated_cycles":"20"}
}
"""
    assert traffic(on_chip) == 32 + 32 + 32  # The slice is read, and y; the result is written.
    assert cycles(on_chip) == 120


def test_cycles_of_a_loop_count_as_often_as_it_goes_round():
    text = MODULE.replace("calls=%fused_update", 'calls=%fused_update, backend_config={"estimated_cycles":"7"}')
    assert cycles(text) == 8 * 7


def test_a_compiled_loop_moves_what_one_counts_by_hand():
    rows, row = 16, 64 * 1024
    xs = jax.ShapeDtypeStruct((rows, row), jnp.float32)
    scanned = jax.jit(lambda xs: lax.scan(lambda c, x: (c + 1.0, jnp.sin(x) * c), jnp.float32(0), xs)[1])
    moved = traffic(scanned.lower(xs).compile().as_text())
    by_hand = 3 * rows * row * 4  # Zeros are written where the rows will stand; each row is read, and written.
    assert by_hand <= moved < 1.001 * by_hand
