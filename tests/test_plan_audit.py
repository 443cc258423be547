"""What must not stand in a compiled step: each fault alone in a small text, and none without it."""

from __future__ import annotations

import pytest

from jaxgpt.planning import audit, hlo
from jaxgpt.planning.collectives import collectives
from jaxgpt.planning.facts import Facts, Leaf

# Two layers of width 64 on 4 devices of fsdp and 2 of data; vocabulary 512, chunks of 128 tokens.
MESH = {"data": 2, "fsdp": 4}
EMBED = Leaf("params/embed", "float32", (512, 64), (512, 16))
STACK = Leaf("params/layers/wq", "float32", (2, 64, 128), (2, 16, 128))
NORM = Leaf("params/layers/norm", "float32", (2, 64), (2, 64))
KNOWN = Facts(
    mesh=MESH,
    leaves=(Leaf("step", "int32", (), ()), EMBED, STACK, NORM),
    num_layers=2,
    stacked=True,
    vocab_size=512,
    half=True,
    micro_batches=4,
    chunk_tokens=128,
    kernels=("splash",),
    platform="tpu",
)
# As the step should be. {} is where a fault is put.
TEXT = """\
HloModule jit_train_step, input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias), {2}: (2, {}, may-alias), {3}: (3, {}, may-alias) }, entry_computation_layout={}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %w = bf16[16,128]{1,0} constant({...})
  %gather = bf16[64,128]{1,0} all-gather(%w), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %kernel.2 = bf16[64,128]{1,0} custom-call(%gather), custom_call_target="__cudnn$fmhaSoftmax"
  %splash_mha_fwd.2 = bf16[64,128]{1,0} custom-call(%gather), custom_call_target="tpu_custom_call"
  IN_LOOP
  ROOT %t = (s32[], f32[8]{0}) tuple(%p)
}

%cond (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (step: s32[], embed: f32[512,16], wq: f32[2,16,128], norm: f32[2,64]) -> f32[512,16] {
  %embed = f32[512,16]{1,0} parameter(1)
  %wq = f32[2,16,128]{2,1,0} parameter(2)
  %start = (s32[], f32[8]{0}) tuple(%embed)
  %logits = f32[1,128,512]{2,1,0} broadcast(%embed)
  %head = f32[512,64]{1,0} broadcast(%embed)
  %while.1 = (s32[], f32[8]{0}) while(%start), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %sum = f32[] all-reduce(%start), channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  AT_END
  ROOT %r = f32[512,16]{1,0} copy(%embed)
}
"""  # noqa: E501


def checked(at_end: str = "", in_loop: str = "", known: Facts = KNOWN, header: str = "") -> list:
    text = TEXT.replace("AT_END", at_end).replace("IN_LOOP", in_loop)
    if header:
        text = text.replace("{3}: (3, {}, may-alias)", header)
    program = hlo.parse(text)
    return list(audit.findings(program, collectives(program, MESH), known))


def test_a_step_without_fault_has_no_finding():
    assert checked() == []


@pytest.mark.parametrize(
    ("check", "line", "size", "axes"),
    [
        # 256 tokens at once, on each device; the last with the vocabulary in front.
        ("full_logits", "%x = f32[2,128,512]{2,1,0} broadcast(%embed)", 4 * 256 * 512, ()),
        ("full_logits", "%x = (f32[512,200]{1,0}, f32[4]{0}) custom-call()", 4 * 200 * 512, ()),
        (
            "gathered_stack",
            "%x = bf16[2,64,128]{2,1,0} all-gather(%wq), replica_groups=[2,4]<=[8], dimensions={1}",
            2 * 64 * 128 * 2 * 3 // 4,
            ("fsdp",),
        ),
        (
            "gathered_float32",
            "%x = f32[512,64]{1,0} all-gather(%embed), replica_groups=[2,4]<=[8], dimensions={1}",
            512 * 64 * 4 * 3 // 4,
            ("fsdp",),
        ),
        (
            "reduced_whole",
            "%x = f32[512,64]{1,0} all-reduce(%head), replica_groups=[2,4]<=[8], to_apply=%add",
            2 * 512 * 64 * 4 * 3 // 4,
            ("fsdp",),
        ),
        (
            "reduced_whole",
            "%x = f32[512,64]{1,0} all-reduce(%head), replica_groups=[1,8]<=[8], to_apply=%add",
            2 * 512 * 64 * 4 * 7 // 8,
            ("data", "fsdp"),
        ),
    ],
)
def test_each_fault_is_found_by_its_check_with_bytes_and_axes(check, line, size, axes):
    found = checked(at_end=line)
    assert [(one.check, one.bytes, one.axes) for one in found] == [(check, size, axes)]
    assert found[0].instruction == "x"
    assert "x" in found[0].line
    assert "\n" not in found[0].line


def test_findings_of_one_kind_are_one_line_with_the_largest_and_their_sum():
    rows = (512, 256, 1024)  # tokens of logits: 1.05, 0.52 and 2.10 MB
    faults = [f"%x.{n} = f32[{n},512]{{1,0}} broadcast(%embed)" for n in rows]
    (line,) = audit.lines(checked(at_end="\n  ".join(faults)))
    assert line.startswith("x.1024: float32 logits of 1,024 tokens, 2.10 MB")
    assert line.endswith("; and 2 more of the kind, 3.67 MB in all")
    assert audit.lines(checked(at_end=faults[0])) == [checked(at_end=faults[0])[0].line]


def test_the_name_of_an_operation_is_cut_to_its_end():
    name = "jit(train_step)/" + 100 * "eval_jaxpr/while/" + "body/mlp/dot_general"
    line = f'%x = f32[512,512]{{1,0}} broadcast(%embed), metadata={{op_name="{name}"}}'
    (found,) = checked(at_end=line)
    assert found.line.endswith("/body/mlp/dot_general)") and "(.../" in found.line
    assert len(found.line) < 200


def test_logits_of_one_chunk_and_weights_of_the_same_size_are_no_finding():
    # 64 tokens of logits would have the shape of the embedding: weights are told by their shapes.
    assert checked(at_end="%x = f32[64,512]{1,0} broadcast(%embed)") == []
    assert checked(at_end="%x = bf16[2,128,512]{2,1,0} broadcast(%embed)") == []


def test_logits_inside_a_fusion_are_no_buffer():
    fused = "%fused (l: f32[]) -> f32[] {\n  %x = f32[256,512]{1,0} broadcast(%l)\n"
    fused += "  ROOT %y = f32[] reduce(%x), to_apply=%add\n}\n\n"
    text = TEXT.replace("%add (a", fused + "%add (a").replace("IN_LOOP", "")
    fusion = hlo.parse(text.replace("AT_END", "%f = f32[] fusion(%sum), kind=kLoop, calls=%fused"))
    call = hlo.parse(text.replace("AT_END", "%f = f32[] call(%sum), to_apply=%fused"))
    assert list(audit.full_logits(fusion, KNOWN)) == []
    assert [one.instruction for one in audit.full_logits(call, KNOWN)] == ["x"]


def test_an_exchange_over_data_for_each_micro_batch_is_found_but_for_scalars():
    groups = "replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add"
    scalar = checked(in_loop=f"%x = f32[] all-reduce(%p), {groups}")
    (found,) = checked(in_loop=f"%x = f32[128,256]{{1,0}} all-reduce(%p), {groups}")
    assert scalar == []
    assert (found.check, found.axes) == ("data_in_micro_batch", ("data",))
    assert found.bytes == 4 * 128 * 256 * 4  # 4 times 2 n (g-1)/g, g = 2
    once = checked(at_end=f"%x = f32[128,256]{{1,0}} all-reduce(%embed), {groups}")
    assert once == []


def test_leaves_that_are_not_donated_are_named_with_their_bytes():
    (found,) = checked(header="{4}: (4, {}, may-alias)")
    assert (found.check, found.instruction, found.bytes) == (
        "not_donated", "params/layers/norm", 2 * 64 * 4,
    )  # fmt: skip


def test_a_missing_attention_kernel_is_named():
    (found,) = checked(known=KNOWN._replace(kernels=("flash",)))
    assert (found.check, found.instruction) == ("missing_kernel", "flash")
    assert checked(known=KNOWN._replace(kernels=("__cudnn$fmha", "splash"))) == []


def test_kernels_are_counted_per_step():
    program = hlo.parse(TEXT.replace("AT_END", "").replace("IN_LOOP", ""))
    assert audit.kernels(program) == {
        "__cudnn$fmhaSoftmax": 4, "tpu_custom_call:splash_mha_fwd": 4,
    }  # fmt: skip


def test_state_bytes_are_those_of_one_device():
    assert KNOWN.state_bytes == 4 + 512 * 16 * 4 + 2 * 16 * 128 * 4 + 2 * 64 * 4


def test_a_parameter_that_each_device_holds_whole_is_found_where_fsdp_should_split_it():
    whole = Leaf("params/lm_head", "float32", (512, 1024), (512, 1024))  # 2 MiB
    known = KNOWN._replace(leaves=(*KNOWN.leaves[:3], whole))
    (found,) = checked(known=known)
    assert (found.check, found.instruction, found.bytes) == (
        "not_split", "params/lm_head", 4 * 512 * 1024,
    )  # fmt: skip
    assert list(audit.not_split(known._replace(mesh={"data": 8}))) == []  # replicated as asked for


# A head split over D by 4, and how it is gathered.
HEAD = Leaf("params/lm_head", "float32", (512, 256), (512, 64))
HEAD_GATHER = "bf16[512,256]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={1}"


@pytest.mark.parametrize(("gathers", "found"), [(1, 0), (2, 1), (3, 1)])
def test_a_head_is_gathered_once_per_micro_batch(gathers, found):
    lines = "\n  ".join(f"%x.{i} = {HEAD_GATHER}" for i in range(gathers))
    findings = checked(in_loop=lines, known=KNOWN._replace(leaves=(*KNOWN.leaves[:3], HEAD)))
    findings = [one for one in findings if one.check != "not_donated"]
    assert [one.check for one in findings] == ["gathered_often"] * found
    times = 4 * gathers  # the loop over micro-batches has 4 passes
    assert all(f"lm_head gathered {times} times a step, 4 would" in one.line for one in findings)


def test_a_blocks_weight_is_gathered_forward_recomputed_and_backward_and_no_more():
    up = Leaf("params/layers/up", "float32", (2, 64, 2048), (2, 16, 2048))
    known = KNOWN._replace(leaves=(*KNOWN.leaves[:3], up))
    gather = "bf16[64,2048]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}"
    lines = [f"%x.{i} = {gather}" for i in range(7)]
    assert checked(in_loop="\n  ".join(lines[:6]), known=known) == []  # 2 layers x 3 x 4 = 24
    (found,) = checked(in_loop="\n  ".join(lines), known=known)
    assert "layers/up gathered 28 times a step, 24 would do" in found.line


def test_a_head_that_is_gathered_for_each_chunk_of_the_loss_is_found():
    known = KNOWN._replace(leaves=(*KNOWN.leaves[:3], HEAD), micro_batches=1)
    (found,) = checked(in_loop=f"%x = {HEAD_GATHER}", known=known)  # 4 chunks in one micro-batch
    assert (found.check, found.bytes) == ("gathered_often", 4 * 512 * 256 * 2 * 3 // 4)
    assert checked(in_loop=f"%x = {HEAD_GATHER}", known=known._replace(losses=4)) == []


def test_a_sum_over_a_whole_torus_of_tpus_says_which_mesh_avoids_it():
    line = "%x = f32[8192,512]{1,0} all-reduce(%head), replica_groups=[1,64]<=[64], to_apply=%add"
    program = hlo.parse(TEXT.replace("AT_END", line).replace("IN_LOOP", ""))
    mesh = {"data": 1, "fsdp": 64}
    for torus, helped in ((64, True), (32, False), (0, False)):  # of 2 slices; of two dimensions
        known = KNOWN._replace(mesh=mesh, torus=torus)
        (found,) = audit.reduced_whole(collectives(program, mesh), known)
        assert ("mesh.data or mesh.tensor" in found.line) == helped


@pytest.mark.parametrize("name", ["params/pos_embed", "params/router"])
def test_what_is_used_in_float32_may_be_gathered_so_but_not_summed_whole(name):
    known = KNOWN._replace(leaves=(KNOWN.leaves[1], Leaf(name, "float32", (600, 32), (150, 32))))
    for kind, count in (("all-gather", 0), ("all-reduce", 1)):
        line = f"%x = f32[600,32]{{1,0}} {kind}(%head), replica_groups=[2,4]<=[8], to_apply=%add"
        program = hlo.parse(TEXT.replace("AT_END", line).replace("IN_LOOP", ""))
        found = [one for one in collectives(program, MESH) if one.name == "x"]
        assert len(found) == 1 and list(audit.gathered_float32(found, known)) == []
        assert len(list(audit.reduced_whole(found, known))) == count


def test_a_cpu_compiler_is_not_blamed_for_what_it_cannot_do():
    line = "%x = f32[512,64]{1,0} all-reduce(%head), replica_groups=[2,4]<=[8], to_apply=%add"
    assert checked(at_end=line, known=KNOWN._replace(platform="cpu")) == []


# As XLA's partitioner writes it for CPU, GPU and TPU (JAX 0.12.0.1), here twice the same.
INVOLUNTARY = "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding "
LOG = (
    f"""\
W1130 01:17:57.207484   29130 spmd_partitioner.cc:666] {INVOLUNTARY}of another program
{audit.BEGIN}
"""
    + 2
    * (
        f"W1130 01:17:58.207484   29130 spmd_partitioner.cc:666] {INVOLUNTARY}"
        "{mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]} to {mesh['x'=4,'y'=2], [{}, {'x', 'y'}, {}]} "
        "efficiently for HLO operation %add.0 = f32[8,16,4]{2,1,0} add(%param, %param), "
        "sharding={}. As the last resort, SPMD will replicate the tensor.\n"
    )
)


def test_involuntary_rematerialisation_is_read_from_what_the_partitioner_says():
    (found,) = audit.involuntary(LOG)
    assert (found.check, found.instruction, found.bytes) == (
        "involuntary", "add.0", 8 * 16 * 4 * 4,
    )  # fmt: skip
    assert audit.involuntary("nothing of note\n") == ()
