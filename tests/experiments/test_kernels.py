"""Bytes, kernels and waits counted in the text of a program, against a text whose figures are known."""

import pytest

from experiments.lib.kernels import SECTOR, counted

N = 2**20
TEXT = f"""HloModule jit_f, is_scheduled=true

%cut (p0: f32[{N}]) -> f32[64] {{
  %p0 = f32[{N}]{{0}} parameter(0)
  %abs = f32[{N}]{{0}} abs(%p0)
  ROOT %slice = f32[64]{{0}} slice(%abs), slice={{[0:64]}}
}}

%taken (p0.1: f32[{N}], p1: s32[100]) -> f32[100] {{
  %p0.1 = f32[{N}]{{0}} parameter(0)
  %p1 = s32[100]{{0}} parameter(1)
  ROOT %gather = f32[100]{{0}} gather(%p0.1, %p1), offset_dims={{}}, start_index_map={{0}}, slice_sizes={{1}}
}}

%put (p0.2: f32[{N}], p1.1: f32[64], p2: s32[]) -> f32[{N}] {{
  %p0.2 = f32[{N}]{{0}} parameter(0)
  %p1.1 = f32[64]{{0}} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %update = f32[{N}]{{0}} dynamic-update-slice(%p0.2, %p1.1, %p2)
}}

%twice (p0.3: f32[{N}]) -> f32[{N}] {{
  %p0.3 = f32[{N}]{{0}} parameter(0)
  ROOT %add = f32[{N}]{{0}} add(%p0.3, %p0.3)
}}

%body (c: (s32[], f32[{N}])) -> (s32[], f32[{N}]) {{
  %c = (s32[], f32[{N}]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[{N}]{{0}} get-tuple-element(%c), index=1
  %fusion.3 = f32[{N}]{{0}} fusion(%x), kind=kLoop, calls=%twice
  ROOT %t = (s32[], f32[{N}]{{0}}) tuple(%i, %fusion.3)
}}

%condition (c.1: (s32[], f32[{N}])) -> pred[] {{
  %c.1 = (s32[], f32[{N}]{{0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%c.1), index=0
  ROOT %less = pred[] compare(%i.1, %i.1), direction=LT
}}

ENTRY %main (x: f32[{N}], at: s32[100]) -> f32[{N}] {{
  %x.1 = f32[{N}]{{0}} parameter(0)
  %at = s32[100]{{0}} parameter(1)
  %zero = s32[] constant(0)
  %fusion = f32[64]{{0}} fusion(%x.1), kind=kLoop, calls=%cut
  %fusion.1 = f32[100]{{0}} fusion(%x.1, %at), kind=kLoop, calls=%taken
  %fusion.2 = f32[{N}]{{0}} fusion(%x.1, %fusion, %zero), kind=kLoop, calls=%put
  %start = (s32[], f32[{N}]{{0}}) tuple(%zero, %fusion.2)
  %loop = (s32[], f32[{N}]{{0}}) while(%start), condition=%condition, body=%body KNOWN
  ROOT %result = f32[{N}]{{0}} get-tuple-element(%loop), index=1
}}
"""
STRAIGHT = 2 * 256 + (100 * SECTOR + 400 + 400) + 2 * 256 + 4  # what is cut, gathered, and put into its place


@pytest.mark.parametrize(
    ("known", "turns", "times", "waits"),
    [(', backend_config={"known_trip_count":{"n":"3"}}', 7, 3, 0), ("", 0, 0, 1), ("", 2, 2, 3)],
)
def test_a_loop_counts_as_often_as_it_turns(known, turns, times, waits):
    found = counted(TEXT.replace(" KNOWN", known), turns)
    asked = (turns > 0 and not known) * times + (not known)  # comparisons for the host
    assert found.launches == 3 + times + asked
    assert found.waits == waits
    assert found.bytes == pytest.approx(STRAIGHT + times * 8 * N + asked * 9)


def test_seconds_are_the_longest_of_memory_and_launch():
    found = counted(TEXT.replace(" KNOWN", ""), 1)
    assert found.seconds(1e12, 1e12, launch=1.0, wait=10.0) == pytest.approx(found.launches + 20)
    slow = found.seconds(1e3, 1e12, launch=0.0, wait=0.0)
    assert slow == pytest.approx(found.bytes / 1e3)


PLACES = f"""HloModule jit_g, is_scheduled=true

%column (p0: f32[1024,1024], p1: s32[1024]) -> f32[1024,64,1] {{
  %p0 = f32[1024,1024]{{1,0}} parameter(0)
  %p1 = s32[1024]{{0}} parameter(1)
  %rows = s32[1024,64,1]{{2,1,0}} broadcast(%p1), dimensions={{0}}
  %place = s32[] constant(7)
  %columns = s32[1024,64,1]{{2,1,0}} broadcast(%place), dimensions={{}}
  %both = s32[1024,64,2]{{2,1,0}} concatenate(%rows, %columns), dimensions={{2}}
  ROOT %gather = f32[1024,64,1]{{2,1,0}} gather(%p0, %both), offset_dims={{2}}, slice_sizes={{1,1}}
}}

%spread (p0.1: f32[100], p1.1: s32[{N}], p2: f32[{N}]) -> f32[100] {{
  %p0.1 = f32[100]{{0}} parameter(0)
  %p1.1 = s32[{N}]{{0}} parameter(1)
  %p2 = f32[{N}]{{0}} parameter(2)
  ROOT %scatter = f32[100]{{0}} scatter(%p0.1, %p1.1, %p2), update_window_dims={{}}, unique_indices=true, to_apply=%add
}}

ENTRY %main (x: f32[1024,1024], row: s32[1024], y: f32[100], at: s32[{N}], updates: f32[{N}]) -> f32[100] {{
  %x = f32[1024,1024]{{1,0}} parameter(0)
  %row = s32[1024]{{0}} parameter(1)
  %y = f32[100]{{0}} parameter(2)
  %at = s32[{N}]{{0}} parameter(3)
  %updates = f32[{N}]{{0}} parameter(4)
  %fusion = f32[1024,64,1]{{2,1,0}} fusion(%x, %row), kind=kLoop, calls=%column
  ROOT %fusion.1 = f32[100]{{0}} fusion(%y, %at, %updates), kind=kInput, calls=%spread
}}
"""


def test_neighbours_share_what_they_read_and_no_place_is_written_twice():
    """A column that is read 64 times over, with the numbers of its rows; 100 places for many updates."""
    column, spread = counted(PLACES).kernels
    assert (column.read, column.written) == (4096 + 4096, 4 * 64 * 1024)
    assert (spread.read, spread.written) == (8 * N, 100 * SECTOR)


@pytest.mark.parametrize(
    ("dtype", "algorithm", "fifteenths"),
    [("f32", "", 15), ("f32", ", algorithm=dot_bf16_bf16_f32_x6", 6), ("f16", "", 1), ("bf16", "", 1)],
)
def test_products_count_by_the_units_that_take_them(dtype, algorithm, fifteenths):
    """512^3 products, of which tensor cores take fifteen in the time of one in f32."""
    text = f"""HloModule jit_f, is_scheduled=true

ENTRY %main (a: {dtype}[512,512], b: {dtype}[512,512]) -> f32[512,512] {{
  %a = {dtype}[512,512]{{1,0}} parameter(0)
  %b = {dtype}[512,512]{{1,0}} parameter(1)
  ROOT %dot = f32[512,512]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{algorithm}
}}
"""
    (kernel,) = counted(text).kernels
    assert kernel.flops == pytest.approx(2 * 512**3 * fifteenths / 15)
