"""Memory traffic read off the text of a compiled program."""

from benchmarks.hlo import kernels, traffic

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
