"""The compiler's own estimates, added up over a schedule written by hand."""

from unity_jax.aot.cycles import Cycles, estimated_cycles
from unity_jax.aot.hlo import parse

ESTIMATE = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'

PROGRAM = f"""\
HloModule step, is_scheduled=true

%fused (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  ROOT %t = f32[8,8]{{1,0}} tanh(%p)
}}

%seen_differently (q: f32[8,8]) -> f32[64] {{
  %q = f32[8,8]{{1,0}} parameter(0)
  ROOT %b = f32[64]{{0}} bitcast(%q)
}}

%body (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %s = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,8]{{1,0}} get-tuple-element(%s), index=1
  %y = f32[8,8]{{1,0}} fusion(%x), kind=kLoop, calls=%fused, {ESTIMATE % 100}
  %sorted = f32[8,8]{{1,0}} sort(%y), dimensions={{1}}
  ROOT %r = (s32[], f32[8,8]) tuple(%i, %sorted)
}}

%until (c: (s32[], f32[8,8])) -> pred[] {{
  %c = (s32[], f32[8,8]) parameter(0)
  %at = s32[] get-tuple-element(%c), index=0
  %end = s32[] constant(5)
  ROOT %more = pred[] compare(%at, %end), direction=LT
}}

%unknown (c2: (s32[], f32[8,8])) -> pred[] {{
  %c2 = (s32[], f32[8,8]) parameter(0)
  ROOT %more2 = pred[] constant(false)
}}

%cheap (a: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  ROOT %c.1 = f32[8,8]{{1,0}} copy(%a), {ESTIMATE % 3}
}}

%dear (a2: f32[8,8]) -> f32[8,8] {{
  %a2 = f32[8,8]{{1,0}} parameter(0)
  ROOT %c.2 = f32[8,8]{{1,0}} copy(%a2), {ESTIMATE % 7}
}}

ENTRY %main (x0: f32[8,8]) -> f32[64] {{
  %x0 = f32[8,8]{{1,0}} parameter(0)
  %n = s32[] constant(0)
  %scalar = s32[] add(%n, %n)
  %copied = f32[8,8]{{1,0}} copy-start(%x0)
  %waited = f32[8,8]{{1,0}} copy-done(%copied)
  %sum = f32[8,8]{{1,0}} all-reduce(%waited), replica_groups={{{{0,1}}}}
  %joined = f32[8,8]{{1,0}} custom-call(%sum), custom_call_target="ConcatBitcast"
  %kernel = f32[8,8]{{1,0}} custom-call(%joined), custom_call_target="tpu_custom_call"
  %start = (s32[], f32[8,8]) tuple(%n, %kernel)
  %loop = (s32[], f32[8,8]) while(%start), condition=%until, body=%body
  %again = (s32[], f32[8,8]) while(%loop), condition=%unknown, body=%body
  %last = f32[8,8]{{1,0}} get-tuple-element(%again), index=1
  %either = f32[8,8]{{1,0}} conditional(%n, %last, %last), branch_computations={{%cheap, %dear}}
  ROOT %flat = f32[64]{{0}} fusion(%either), kind=kLoop, calls=%seen_differently
}}
"""


def test_loops_count_their_trips_and_branches_their_costliest():
    found = estimated_cycles(parse(PROGRAM))
    assert found == Cycles(total=5 * 100 + 100 + 7, counted=3, missing=3, endless=1)  # two sorts, one kernel


def test_the_largest_integer_is_no_estimate():
    largest = parse(PROGRAM.replace(ESTIMATE % 100, ESTIMATE % (2**63 - 1)))
    assert estimated_cycles(largest) == Cycles(total=7, counted=1, missing=5, endless=1)
