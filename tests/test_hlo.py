"""Compiled text as records: sizes by arithmetic, loops as two compilers print them."""

from __future__ import annotations

import pytest

from jaxgpt.planning import hlo

# Cut from a step that libtpu 0.0.50 compiled for v5e: two layers inside two micro-batches. Nothing
# says how often a loop runs, counters pass through copies, and a kernel's metadata has lines.
TPU_LOOPS = """\
HloModule jit_train_step, is_scheduled=true, entry_computation_layout={(s32[]{:T(128)})->s32[]}

%cond (wide.param.88: (s32[], bf16[2,256,256])) -> pred[] {
  %constant.360.clone.3 = s32[]{:T(128)} constant(2)
  %wide.param.88 = (s32[]{:T(128)}, bf16[2,256,256]{1,2,0:T(8,128)(2,1)S(1)}) parameter(0)
  %get-tuple-element.2608 = s32[]{:T(128)} get-tuple-element(%wide.param.88), index=0
  ROOT %lt.71 = pred[]{:T(512)} compare(%get-tuple-element.2608, %constant.360.clone.3), direction=LT
}

%layer.sunk (wide.param.1: (s32[], bf16[2,256,256])) -> (s32[], bf16[2,256,256]) {
  %constant.360 = s32[]{:T(128)} constant(1)
  %wide.param.1 = (s32[]{:T(128)}, bf16[2,256,256]{1,2,0:T(8,128)(2,1)S(1)}) parameter(0)
  %get-tuple-element.1 = s32[]{:T(128)} get-tuple-element(%wide.param.1), index=0
  %get-tuple-element.2 = bf16[2,256,256]{1,2,0:T(8,128)(2,1)S(1)} get-tuple-element(%wide.param.1), index=1
  %splash.1 = bf16[2,256,256]{1,2,0} custom-call(%get-tuple-element.2.q_ref), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 256}"
}}, metadata={op_name="jit(train_step)/attention/splash"}
  %add.561 = s32[]{:T(128)} add(%get-tuple-element.1, %constant.360)
  %copy.768 = s32[]{:T(128)} copy(%add.561)
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[2,256,256]{1,2,0:T(8,128)(2,1)S(1)}) tuple(%copy.768, %splash.1)
}

%micro.sunk (wide.param.0: (s32[], bf16[2,256,256])) -> (s32[], bf16[2,256,256]) {
  %constant.391.clone..sunk = s32[]{:T(128)} constant(0)
  %constant.1 = s32[]{:T(128)} constant(1)
  %wide.param.0 = (s32[]{:T(128)}, bf16[2,256,256]{1,2,0:T(8,128)(2,1)S(1)}) parameter(0)
  %get-tuple-element.3 = s32[]{:T(128)} get-tuple-element(%wide.param.0), index=0
  %get-tuple-element.4 = bf16[2,256,256]{1,2,0:T(8,128)(2,1)S(1)} get-tuple-element(%wide.param.0), index=1
  %copy.770 = s32[]{:T(128)} copy(%constant.391.clone..sunk)
  %tuple.322 = (s32[]{:T(128)}, /*index=1*/bf16[2,256,256]{1,2,0:T(8,128)(2,1)S(1)}) tuple(%copy.770, %get-tuple-element.4)
  %while.195 = (s32[]{:T(128)}, bf16[2,256,256]{1,2,0:T(8,128)(2,1)S(1)}) while(%tuple.322), condition=%cond, body=%layer.sunk
  %get-tuple-element.5 = bf16[2,256,256]{1,2,0:T(8,128)(2,1)S(1)} get-tuple-element(%while.195), index=1
  %add.7 = s32[]{:T(128)} add(%get-tuple-element.3, %constant.1)
  ROOT %tuple.3 = (s32[]{:T(128)}, bf16[2,256,256]{1,2,0:T(8,128)(2,1)S(1)}) tuple(%add.7, %get-tuple-element.5)
}

%micro_cond (p: (s32[], bf16[2,256,256])) -> pred[] {
  %constant.9 = s32[]{:T(128)} constant(6)
  %p = (s32[]{:T(128)}, bf16[2,256,256]{1,2,0}) parameter(0)
  %get-tuple-element.6 = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%get-tuple-element.6, %constant.9), direction=LT
}

ENTRY %main.45_spmd (param: bf16[2,256,256]) -> bf16[2,256,256] {
  %param = bf16[2,256,256]{1,2,0} parameter(0), metadata={op_name="state.params.embed"}
  %constant.2 = s32[]{:T(128)} constant(3)
  %tuple.4 = (s32[]{:T(128)}, bf16[2,256,256]{1,2,0}) tuple(%constant.2, %param)
  %while.194 = (s32[]{:T(128)}, bf16[2,256,256]{1,2,0}) while(%tuple.4), condition=%micro_cond, body=%micro.sunk
  ROOT %get-tuple-element.7 = bf16[2,256,256]{1,2,0} get-tuple-element(%while.194), index=1
}
"""  # noqa: E501
# XLA:GPU and XLA:CPU say the length; the wrapped call is named at both ends.
GPU_LOOP = """\
HloModule jit_f, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %p = (s32[], f32[8]{0}) parameter(0)
}

%cond (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

%wrapped (w: f32[8]) -> f32[8] {
  %w = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%w)
}

ENTRY %main (x: (s32[], f32[8])) -> f32[8] {
  %x = (s32[], f32[8]{0}) parameter(0)
  %while.72 = (s32[], f32[8]{0}) while(%x), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"32"},"known_init_step":{"init":"0","step":"1"}}
  %y = f32[8]{0} get-tuple-element(%while.72), index=1
  %s = ((f32[8]{0}), f32[8]{0}, u32[]) call-start(%y), async_execution_thread="sparsecore", to_apply=%wrapped
  ROOT %d = f32[8]{0} call-done(%s), to_apply=%wrapped
}
"""  # noqa: E501


def test_a_loop_without_a_stated_length_is_counted_from_its_counter():
    program = hlo.parse(TPU_LOOPS)
    assert program.passes == {"while.195": 2, "while.194": 3}  # 0, 1 and 3, 4, 5


def test_runs_of_nested_loops_multiply():
    runs = hlo.parse(TPU_LOOPS).runs
    assert (runs["main.45_spmd"], runs["micro.sunk"], runs["layer.sunk"]) == (1, 3, 6)


def test_a_stated_length_is_taken_and_an_asynchronous_call_is_counted_once():
    runs = hlo.parse(GPU_LOOP).runs
    assert runs["body"] == 32
    assert runs["wrapped"] == 1


def test_a_loop_whose_counter_is_not_followed_is_named_and_counted_once():
    text = TPU_LOOPS.replace("direction=LT", "direction=NE")
    program = hlo.parse(text)
    assert program.unknown_loops == ("while.195", "while.194")
    assert program.runs["layer.sunk"] == 1


def test_an_instruction_of_several_lines_does_not_end_its_computation():
    lines = hlo.parse(TPU_LOOPS).computations["layer.sunk"]
    assert [line.opcode for line in lines][-1] == "tuple"
    call = next(line for line in lines if line.opcode == "custom-call")
    assert call.operands == ("get-tuple-element.2.q_ref",)
    assert call.op_name == "jit(train_step)/attention/splash"


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[3,5]{1,0}", 60),
        ("bf16[128,256]{1,0:T(8,128)(2,1)S(1)}", 65536),
        ("pred[]", 1),
        ("s4[3]{0:E(4)}", 2),  # 12 bits
        ("f8e4m3fn[7]", 7),
        ("(f32[2]{0}, (u32[]{:S(2)}, bf16[4]{0}))", 8 + 4 + 8),
        ("token[]", 0),
    ],
)
def test_sizes_of_shapes(shape, size):
    assert hlo.num_bytes(shape) == size


def test_a_tuple_falls_into_its_outer_parts():
    shape = (
        "((bf16[32,256]{1,0:T(8,128)(2,1)}, f32[1]), /*index=1*/bf16[256,256]{1,0}, u32[]{:S(2)})"
    )
    assert hlo.parts(shape) == [
        "(bf16[32,256]{1,0:T(8,128)(2,1)}, f32[1])", "bf16[256,256]{1,0}", "u32[]{:S(2)}",
    ]  # fmt: skip


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("HloModule nothing\n")
