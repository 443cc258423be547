"""Exchanges read off compiled text: groups and bytes by hand, and programs with known exchanges."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxgpt.planning.collectives import axes_of, collectives, replica_groups, table

MESH = {"data": 2, "fsdp": 4}
P = PartitionSpec

# Cut from programs that libtpu 0.0.50 compiled. One gradient each over fsdp of a 2x2x2 mesh; two
# at once over 4 devices; and an all-gather spread over a matrix product.
TPU_SCATTER = """\
HloModule jit_f, is_scheduled=true

%all-reduce-scatter (input: bf16[1024,2048]) -> bf16[512,2048] {
  %input = bf16[1024,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-reduce.11 = bf16[1024,2048]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=12, replica_groups={{0,2},{4,6},{1,3},{5,7}}, use_global_device_ids=true, to_apply=%add.3.clone, frontend_attributes={from-cross-replica-sharding="true"}
  %constant.shard_id_table = u32[8]{0:T(128)} constant({0, 0, 1, 1, 0, 0, 1, 1})
  %partition-id.5 = u32[] partition-id()
  %dynamic-slice.43 = u32[1]{0:T(128)} dynamic-slice(%constant.shard_id_table, %partition-id.5), dynamic_slice_sizes={1}
  %bitcast.10 = u32[]{:T(128)} bitcast(%dynamic-slice.43)
  %constant.81 = u32[] constant(512)
  %multiply.7 = u32[]{:T(128)} multiply(%bitcast.10, %constant.81)
  %constant.82 = u32[] constant(0)
  ROOT %dynamic-slice.44 = bf16[512,2048]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.11, %multiply.7, %constant.82), dynamic_slice_sizes={512,2048}
}

ENTRY %main.8_spmd (copy-done.25: bf16[1024,2048]) -> bf16[512,2048] {
  %copy-done.25 = bf16[1024,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %fusion.2 = bf16[512,2048]{1,0:T(8,128)(2,1)} fusion(%copy-done.25), kind=kCustom, calls=%all-reduce-scatter, metadata={op_name="jit(f)/transpose(jvp())/dot_general" stack_frame_id=11}
}
"""  # noqa: E501
TPU_SCATTER_OF_TWO = """\
HloModule jit_f, is_scheduled=true

%all-reduce-scatter.8.clone.1 (input_0.2: bf16[256,256], input_5.2: bf16[512,256]) -> (bf16[64,256], bf16[512,64]) {
  %input_0.2 = bf16[256,256]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %input_5.2 = bf16[512,256]{0,1:T(8,128)(2,1)S(1)} parameter(1)
  %all-reduce.72 = (bf16[256,256]{1,0:T(8,128)(2,1)}, bf16[512,256]{0,1:T(8,128)(2,1)}) all-reduce(%input_0.2, %input_5.2), channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=%add
  %get-tuple-element.3138 = bf16[256,256]{1,0:T(8,128)(2,1)} get-tuple-element(%all-reduce.72), index=0
  %partition-id.35 = u32[] partition-id()
  %constant.967 = u32[] constant(64)
  %multiply.176 = u32[]{:T(128)} multiply(%partition-id.35, %constant.967)
  %constant.968 = u32[] constant(0)
  %dynamic-slice.205 = bf16[64,256]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%get-tuple-element.3138, %multiply.176, %constant.968), dynamic_slice_sizes={64,256}
  %get-tuple-element.3143 = bf16[512,256]{0,1:T(8,128)(2,1)} get-tuple-element(%all-reduce.72), index=1
  %dynamic-slice.210 = bf16[512,64]{0,1:T(8,128)(2,1)S(1)} dynamic-slice(%get-tuple-element.3143, %constant.968, %multiply.176), dynamic_slice_sizes={512,64}
  ROOT %tuple.251 = (bf16[64,256]{1,0:T(8,128)(2,1)S(1)}, bf16[512,64]{0,1:T(8,128)(2,1)S(1)}) tuple(%dynamic-slice.205, %dynamic-slice.210)
}

ENTRY %main (a: bf16[256,256], b: bf16[512,256]) -> (bf16[64,256], bf16[512,64]) {
  %a = bf16[256,256]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = bf16[512,256]{0,1:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %fusion.2 = (bf16[64,256]{1,0:T(8,128)(2,1)}, bf16[512,64]{0,1:T(8,128)(2,1)}) fusion(%a, %b), kind=kCustom, calls=%all-reduce-scatter.8.clone.1
}
"""  # noqa: E501
TPU_PIECES = """\
HloModule jit_f, is_scheduled=true

%fused_computation.160 (param_0.487: bf16[4096,128]) -> (bf16[4096,128], bf16[4096,1024], u32[]) {
  %param_0.487 = bf16[4096,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.14 = bf16[4096,1024]{1,0:T(8,128)(2,1)} all-gather(%param_0.487), channel_id=7, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={1}, use_global_device_ids=true, frontend_attributes={chain_id="0"}
  ROOT %custom-call.10 = (bf16[4096,128]{1,0:T(8,128)(2,1)S(1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) custom-call(%all-gather.14), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.209 (param_0.492: bf16[4096,128], param_1: u32[]) -> bf16[4096,1024] {
  %param_0.492 = bf16[4096,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %all-gather.16 = bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)} all-gather(%param_0.492), channel_id=7, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={1}, use_global_device_ids=true
}

%fused_computation.163 (param_0.502: bf16[4096,128], param_1.514: u32[]) -> bf16[4096,1024] {
  %param_0.502 = bf16[4096,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_1.514 = u32[]{:S(2)} parameter(1)
  %all-gather.20 = bf16[4096,1024]{1,0:T(8,128)(2,1)} all-gather(%param_0.502), channel_id=7, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={1}, use_global_device_ids=true
  ROOT %custom-call.12 = bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)} custom-call(%param_0.502, %all-gather.20, %param_1.514), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[4096,128]) -> bf16[4096,1024] {
  %x = bf16[4096,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %start = (bf16[4096,128]{1,0:T(8,128)(2,1)S(1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) fusion(%x), kind=kCustom, calls=%fused_computation.160
  %flag = u32[]{:S(2)} get-tuple-element(%start), index=2
  %fusion.209 = bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%x, %flag), kind=kOutput, calls=%async_collective_fusion.209
  ROOT %done = bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%x, %flag), kind=kCustom, calls=%fused_computation.163
}
"""  # noqa: E501
# Cut from a step that XLA:GPU of JAX 0.12 compiled for 8 H100; and a ring of libtpu's.
GPU_STARTS = """\
HloModule jit_train_step, is_scheduled=true

ENTRY %main (p: bf16[32,256], q: bf16[32,512]) -> bf16[32,256] {
  %p = bf16[32,256]{1,0} parameter(0)
  %q = bf16[32,512]{1,0} parameter(1)
  %all-gather-start.1 = ((bf16[32,256]{1,0}, bf16[32,512]{1,0}), (bf16[256,256]{1,0}, bf16[256,512]{1,0})) all-gather-start(%p, %q), channel_id=3, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, use_global_device_ids=true
  %all-gather-done.1 = (bf16[256,256]{1,0}, bf16[256,512]{1,0}) all-gather-done(%all-gather-start.1)
  %g = bf16[256,256]{1,0} get-tuple-element(%all-gather-done.1), index=0
  %reduce-scatter-start = ((bf16[256,256]{1,0}), bf16[32,256]{1,0}) reduce-scatter-start(%g), channel_id=9, replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
  %reduce-scatter-done = bf16[32,256]{1,0} reduce-scatter-done(%reduce-scatter-start)
  %all-reduce-start = bf16[32,256]{1,0} all-reduce-start(%reduce-scatter-done), channel_id=11, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %all-reduce-done = bf16[32,256]{1,0} all-reduce-done(%all-reduce-start)
  %collective-permute-start.40 = (bf16[32,256]{1,0:T(8,128)(2,1)}, bf16[32,256]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%all-reduce-done), channel_id=3, source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}
  ROOT %collective-permute-done.40 = bf16[32,256]{1,0:T(8,128)(2,1)} collective-permute-done(%collective-permute-start.40)
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("{}", [[0, 1, 2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        # 0..3 as [2,2] transposed is 0 2 / 1 3.
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        # The mesh itself is 0 2 / 1 3, so along its second axis.
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", [[3, 1], [2, 0]]),
        # Of an axis of 4, the major half is what tells 0 1 from 2 3, the minor one 0 2 from 1 3.
        ("mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("mesh['a'=4] {'a':(1)2,'a':(2)2}", [[0, 1, 2, 3]]),
    ],
)
def test_all_spellings_of_groups(text, groups):
    assert replica_groups(text, 4).tolist() == groups


def test_groups_of_many_axes_are_those_of_numpy():
    text = "mesh['stage'=2,'data'=3,'fsdp'=4,'tensor'=2] {'data','tensor'}"
    grid = np.arange(48).reshape(2, 3, 4, 2).transpose(0, 2, 1, 3)
    assert replica_groups(text, 48).tolist() == grid.reshape(8, 6).tolist()


@pytest.mark.parametrize(
    ("groups", "axes", "partial"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], ("fsdp",), False),
        ([[0, 4], [1, 5], [2, 6], [3, 7]], ("data",), False),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], ("data", "fsdp"), False),
        ([[0, 2], [1, 3], [4, 6], [5, 7]], ("fsdp",), True),
        ([[0], [1], [2], [3], [4], [5], [6], [7]], (), False),
    ],
)
def test_groups_are_named_by_the_axes_that_their_members_differ_in(groups, axes, partial):
    assert axes_of(np.array(groups), MESH) == (axes, partial)


def test_a_reduce_scatter_that_libtpu_has_fused_is_one():
    (one,) = collectives(TPU_SCATTER, {"data": 2, "fsdp": 2, "tensor": 2})
    assert (one.kind, one.axes, one.group) == ("reduce-scatter", ("fsdp",), 2)
    assert one.whole_bytes == 1024 * 2048 * 2
    assert one.bytes == 1024 * 2048 * 2 // 2
    assert one.op_name == "jit(f)/transpose(jvp())/dot_general"


def test_a_fused_reduce_scatter_of_several_arrays_is_one():
    (one,) = collectives(TPU_SCATTER_OF_TWO, {"fsdp": 4})
    assert one.kind == "reduce-scatter"
    assert one.bytes == 3 * (256 * 256 + 512 * 256) * 2 // 4


def test_an_all_reduce_that_gives_back_all_of_it_stays_one():
    text = TPU_SCATTER.replace("calls=%all-reduce-scatter", "calls=%other")
    text = text.replace("%all-reduce-scatter (", "%other (")
    text = text.replace("ROOT %dynamic-slice.44", "%dynamic-slice.44").replace(
        "dynamic_slice_sizes={512,2048}",
        "dynamic_slice_sizes={512,2048}\n  ROOT %b = bf16[1024,2048]{1,0} bitcast(%all-reduce.11)",
    )
    (one,) = collectives(text, {"data": 2, "fsdp": 2, "tensor": 2})
    assert (one.kind, one.bytes) == ("all-reduce", 1024 * 2048 * 2)  # 2 n (g-1)/g with g = 2


def test_an_exchange_cut_into_pieces_is_counted_once():
    (one,) = collectives(TPU_PIECES, {"fsdp": 8})
    assert (one.name, one.runs, one.overlapped) == ("all-gather.14", 1, True)
    assert one.bytes == 4096 * 1024 * 2 * 7 // 8


def test_started_exchanges_are_counted_by_their_results():
    found = {one.kind: one for one in collectives(GPU_STARTS, MESH)}
    assert found["all-gather"].bytes == (256 * 256 + 256 * 512) * 2 * 7 // 8
    assert found["reduce-scatter"].bytes == 256 * 256 * 2 * 7 // 8
    assert found["all-reduce"].bytes == 2 * 32 * 256 * 2 * 3 // 4
    assert found["collective-permute"].bytes == 32 * 256 * 2
    assert [one.axes for one in found.values()].count(("fsdp",)) == 2


WORK = "  %work = bf16[32,256]{1,0} fusion(%p), kind=kOutput, calls=%any\n"
AWAITED = "  %all-reduce-done = "


@pytest.mark.parametrize(
    ("text", "overlapped"),
    [
        (GPU_STARTS, False),  # awaited at once
        (GPU_STARTS.replace(AWAITED, WORK + AWAITED), True),
        (GPU_STARTS.replace(AWAITED, "  %c = f32[] constant(0)\n" + AWAITED), False),
        # Marked as one by XLA for GPU, and what is awaited by another pass of a loop.
        (
            GPU_STARTS.replace(AWAITED, WORK + AWAITED).replace(
                "{{0,1,2,3},{4,5,6,7}}, to", '{{0,1,2,3},{4,5,6,7}}, x={"is_sync":true}, to'
            ),
            False,
        ),
        (GPU_STARTS.replace("all-reduce-done(%all-reduce-start)", "copy(%p)"), True),
    ],
    ids=["at-once", "work", "no-work", "marked", "next-pass"],
)
def test_an_exchange_overlaps_only_with_work_before_it_is_awaited(text, overlapped):
    found = {one.kind: one.overlapped for one in collectives(text, MESH)}
    assert found["all-reduce"] is overlapped


def test_libtpus_pieces_overlap_with_what_lies_between_the_first_and_the_last():
    between = next(line for line in TPU_PIECES.splitlines() if "%fusion.209 =" in line)
    (one,) = collectives(TPU_PIECES.replace(between + "\n", ""), {"fsdp": 8})
    assert not one.overlapped


def test_the_table_sums_by_axes_and_kind():
    assert [(row.kind, row.axes, row.count) for row in table(collectives(GPU_STARTS, MESH))] == [
        ("all-gather", ("data", "fsdp"), 1),
        ("reduce-scatter", ("data", "fsdp"), 1),
        ("all-reduce", ("fsdp",), 1),
        ("collective-permute", ("fsdp",), 1),
    ]


@functools.cache
def of_a_program_with_one_of_each() -> dict:
    """Compile five exchanges inside a loop of 3 for 8 devices; return them by kind and axes."""
    mesh = jax.make_mesh((2, 4), tuple(MESH), (AxisType.Auto,) * 2)

    def local(x):  # [16, 8] of float32 on each device
        def body(x, _):
            x = jax.lax.psum(x, "data") * 0.5
            whole = jnp.sin(jax.lax.all_gather(x, "fsdp", axis=0, tiled=True))  # [64, 8]
            x = jax.lax.psum_scatter(whole, "fsdp", scatter_dimension=0, tiled=True)
            x = jnp.cos(jax.lax.all_to_all(x, "fsdp", 0, 0, tiled=True))
            return jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]), None

        return jax.lax.scan(body, x, None, length=3)[0]

    f = jax.shard_map(
        local, mesh=mesh, in_specs=P(("data", "fsdp")), out_specs=P(("data", "fsdp")),
        check_vma=False,
    )  # fmt: skip
    x = jax.ShapeDtypeStruct((128, 8), jnp.float32)
    text = jax.jit(f).lower(x).compile().as_text()
    return {one.kind: one for one in collectives(text, mesh.shape)}


@pytest.mark.parametrize(
    ("kind", "axis", "sent"),
    [
        ("all-reduce", "data", 2 * 16 * 8 * 4 * 1 // 2),
        ("all-gather", "fsdp", 64 * 8 * 4 * 3 // 4),
        ("reduce-scatter", "fsdp", 64 * 8 * 4 * 3 // 4),
        ("all-to-all", "fsdp", 16 * 8 * 4 * 3 // 4),
        ("collective-permute", "fsdp", 16 * 8 * 4),
    ],
)
def test_exchanges_written_by_hand_are_found_with_axis_bytes_and_runs(kind, axis, sent):
    one = of_a_program_with_one_of_each()[kind]
    assert (one.axes, one.bytes, one.runs) == ((axis,), sent, 3)
    assert not one.partial
