"""The sanitizer's script: what it reads out of a tool's words, what it proves, what it makes of tools that fail."""

import json
import sys
from pathlib import Path

import pytest

from tests.unit.triton.apart import run_apart

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "ci/perf"))

import device_sanitize  # noqa: E402
from device_sanitize import Tool, lacking, save, steps  # noqa: E402
from sanitize_order import Code, Unclear, ordered  # noqa: E402
from sanitize_report import Access, Kernels, judged, races_in  # noqa: E402

# Recorded on a device: racecheck on an engine's kernels.
RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at prompt_kernel+0x160 in attention_stream.py:216
=========     and Write access at prompt_kernel+0x12e80 in attention_stream.py:216 [2 hazards]
=========     and Write access at prompt_kernel+0x1ca10 in attention_stream.py:280 [15 hazards]
=========
========= Error: Race reported between Read access at prompt_kernel+0x9f70 in attention_stream.py:216
=========     and Write access at prompt_kernel+0x12eb0 in attention_stream.py:216 [8 hazards]
=========
LOAD {"name": "prompts", "seconds": 1.0, "kernels": {"prompt_kernel": 2}, "problem": ""}
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
# The other warps of a block begin at .L_x_1, read what is theirs to do and do it until they are told to end. Stores in
# front: before the barrier; in the middle: while they work. Counts of barrier 1: 0x0040 after 0, 0x0080 after 3.
CODE = """
.text.some_kernel:
        /*0000*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0020*/                   LDS.U8 R0, [R0+0x44] ;
        /*0030*/                   BRX R2 -0x40    (*"BRANCH_TARGETS .L_x_2,.L_x_3"*);
.L_x_0:
        /*0040*/                   STS.64 [UR6+0x48], R16 ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0068*/                   STS [R5], R6 ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0080*/                   STS.64 [UR6+0x48], R2 ;
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
.L_x_3:
        /*00a0*/                   EXIT ;
.L_x_2:
        /*00b0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*00b8*/                   LDS R7, [R5] ;
        /*00c0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*00d0*/                   BRA `(.L_x_1) ;
"""


def test_races_are_read():
    races = races_in(RACES)
    assert [len(race.others) for race in races] == [2, 1]
    assert races[0].first == Access("Read", "prompt_kernel", 0x160)
    assert races[0].others[1] == Access("Write", "prompt_kernel", 0x1CA10)
    assert races[1].others == [Access("Write", "prompt_kernel", 0x12EB0)]


def test_races_without_a_proof_stay(tmp_path):
    found = judged(RACES, Kernels(tmp_path, Path("nvdisasm")))
    assert (found["errors"], found["left"], found["cleared"]) == (2, 2, [])
    assert judged(RACES.replace("SUMMARY", "SUM"), Kernels(tmp_path, Path("nvdisasm")))["left"] is None
    odd = RACES.replace("prompt_kernel+0x12eb0", "somewhere")
    assert races_in(odd)[1].others == [Access("", "", -1)], "a line that is not understood clears nothing"


def test_races_of_kernels_that_are_not_ours_are_told_apart(tmp_path):
    name = "void at::native::sort<(int)2, float>(T2 *, int)"
    text = RACES.replace("prompt_kernel+0x9f70", f"{name}+0x10").replace("prompt_kernel+0x12eb0", f"{name}+0x20")
    found = judged(text, Kernels(tmp_path, Path("nvdisasm")), "", {"prompt_kernel"})
    assert (found["left"], len(found["foreign"])) == (1, 1) and name in found["foreign"][0][0]
    half = RACES.replace("prompt_kernel+0x9f70", f"{name}+0x10")
    assert judged(half, Kernels(tmp_path, Path("nvdisasm")), "", {"prompt_kernel"})["left"] == 2


def test_a_barrier_between_two_accesses():
    code = Code.of(CODE)
    assert code.barriers() == ["0x1"]
    assert "LDS after 1, 4, 7 ...; STS after 0 times" in ordered(code, 0x20, 0x40)
    assert ordered(code, 0x80, 0x20)
    assert ordered(code, 0x68, 0xB8) == "", "both between the second and the third"
    assert ordered(code, 0x20, 0xD0) == "" and ordered(code, 0x20, 0x9999) == "", "no access to shared memory"
    assert ordered(code, 0xB8, 0x20) == "", "of two accesses in loops nothing is said"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ", "/*0050*/                   BAR.SYNC 0x1, 0x80 "),
        ("/*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ", "/*0050*/                   BAR.ARV 0x1 "),
        ("/*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ", "/*0010*/                   NOP "),
        ("/*0010*/                   BAR.SYNC", "/*0010*/              @P1 BAR.SYNC"),
    ],
)
def test_no_barrier_no_proof(old, new):
    assert old in CODE
    code = Code.of(CODE.replace(old, new))
    assert not all(ordered(code, 0x20, store) for store in (0x40, 0x80))


def test_a_predicate_holds_until_it_is_set_anew():
    """Two barriers and a jump under one predicate are all taken or none."""
    front = "/*0028*/ @P3 BAR.SYNC 0x1 ;\n/*0029*/ @P3 BAR.SYNC 0x1 ;\n{}/*002b*/ @P3 BRA `(.L_x_1) ;\n        /*0030*/"
    assert ordered(Code.of(CODE.replace("        /*0030*/", front.format(""))), 0x20, 0x40)
    for setter in ("ISETP.GT.U32.AND P3, PT, R0, 0x4, PT", "R2P PR, R5, 0x7f"):
        changed = Code.of(CODE.replace("        /*0030*/", front.format(f"/*002a*/ {setter} ;\n")))
        assert ordered(changed, 0x20, 0x80) == ""


def test_warps_that_part_meet_again():
    back = "/*0001*/ BSSY B0, `(.L_x_9) ;\n/*0002*/ @P1 BSYNC B0 ;\n/*0003*/ BSYNC B0 ;\n.L_x_9:\n        /*0040*/"
    code = Code.of(CODE.replace("        /*0040*/", back))
    assert ordered(code, 0x20, 0x40)
    with pytest.raises(Unclear):
        ordered(Code.of(CODE.replace("        /*0040*/", "/*0003*/ BSYNC B0 ;\n        /*0040*/")), 0x20, 0x40)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('    (*"BRANCH_TARGETS .L_x_2,.L_x_3"*)', ""),
        ("BRA `(.L_x_1)", "BRA `(.L_x_7)"),
        ("/*00d0*/                   BRA `(.L_x_1) ;", ""),
        ("BAR.SYNC.DEFER_BLOCKING 0x1 ;\n        /*00d0*/", "BAR.SYNC R3 ;\n        /*00d0*/"),
    ],
)
def test_code_that_is_not_followed_proves_nothing(old, new):
    assert old in CODE
    with pytest.raises(Unclear):
        ordered(Code.of(CODE.replace(old, new)), 0x20, 0x40)


def test_a_file_without_code_is_not_taken_for_a_kernel():
    with pytest.raises(Unclear):
        Code.of("nothing")


PLAN = {"loads": {"one": ["a", "b"], "two": ["c"]}, "every": ["a", "b", "c", "d"], "whole": False}
ENDED = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed",
}


def tool_of(name, *lines, end="", status=0):
    """A tool whose process says these lines."""
    script = f"print({chr(10).join([*lines, end or ENDED.get(name, '')])!r}); raise SystemExit({status})"
    process = device_sanitize.subprocess.Popen(
        [sys.executable, "-c", script], stdout=-1, stderr=-2, text=True, start_new_session=True
    )
    tool = Tool(name, process)
    device_sanitize.threading.Thread(target=tool.listen, daemon=True).start()
    for _ in steps([tool], device_sanitize.time.monotonic() + 60):
        pass
    return tool


def load(name, problem="", **kernels):
    return "LOAD " + json.dumps({"name": name, "seconds": 1.0, "kernels": kernels, "problem": problem})


def result_of(tmp_path, name, *lines, plan=PLAN, **more):
    return tool_of(name, "PLANNED " + json.dumps(plan), *lines, **more).result(Kernels(tmp_path, Path("nvdisasm")))


def test_a_tool_is_clean_when_all_ran_and_nothing_was_found(tmp_path):
    good = load("one", a=2, b=1), load("two", c=1, a=1)
    assert result_of(tmp_path, "memcheck", *good)["clean"]
    assert result_of(tmp_path, "plain", *good)["clean"]
    missing = result_of(tmp_path, "memcheck", load("one", a=2), good[1])
    assert not missing["clean"] and missing["missing"] == ["b"]
    whole = result_of(tmp_path, "memcheck", *good, plan=PLAN | {"whole": True})
    assert not whole["clean"] and whole["missing"] == ["d"]
    assert not result_of(tmp_path, "memcheck", *good, end="========= ERROR SUMMARY: 1 error")["clean"]
    assert not result_of(tmp_path, "memcheck", *good, status=1)["clean"]
    assert not result_of(tmp_path, "memcheck", *good, end="no summary")["clean"]
    assert not result_of(tmp_path, "memcheck", good[0])["clean"], "a load did not come to its end"
    broken = result_of(tmp_path, "memcheck", load("one", "Traceback", a=1, b=1), good[1])
    assert not broken["clean"] and broken["problems"] == ["one"]


def test_a_tool_that_sees_no_race_proves_nothing(tmp_path):
    plan = {"loads": {"racing": ["racing"]}, "every": [], "whole": False}
    blind = result_of(tmp_path, "racecheck", load("racing", racing=1), plan=plan)
    assert blind["sees_no_race"] and not blind["clean"]
    race = "========= Error: Race reported between Write access at racing+0x10 in f.py:1\n"
    race += "=========     and Read access at racing+0x20 in f.py:2 [3 hazards]\n"
    end = race + "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
    assert result_of(tmp_path, "racecheck", load("racing", racing=1), plan=plan, end=end)["clean"]
    other = end.replace("racing+", "walking+")
    assert not result_of(tmp_path, "racecheck", load("racing", racing=1), plan=plan, end=other)["clean"]


def test_what_takes_too_long_is_stopped(tmp_path):
    process = device_sanitize.subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], stdout=-1, stderr=-2, text=True, start_new_session=True
    )
    tool = Tool("memcheck", process)
    device_sanitize.threading.Thread(target=tool.listen, daemon=True).start()
    for _ in steps([tool], device_sanitize.time.monotonic() + 0.5):
        pass
    found = tool.result(Kernels(tmp_path, Path("nvdisasm")))
    assert not found["clean"] and not found["ended"] and "took too long" in found["output"]


def test_parts_make_a_whole(tmp_path):
    path, facts = tmp_path / "found.json", {"commit": "c", "machine": "m", "sanitizer": "s"}

    def call(begun, clean, *kernels):
        loads = {"x": {"kernels": dict.fromkeys(kernels, 1)}}
        return {"begun": begun, "every": ["a", "b"], "tools": {"racecheck": {"clean": clean, "loads": loads}}}

    save(path, facts, call(1.0, True, "a"))
    assert json.loads(path.read_text())["lacking"] == {"racecheck": ["b"]}
    save(path, facts, call(2.0, False, "b"))
    assert lacking(save(path, facts, call(2.0, False, "b"))) == {"racecheck": ["b"]}, "not clean: not had"
    save(path, facts, call(2.0, True, "b"))
    held = json.loads(path.read_text())
    assert held["lacking"] == {"racecheck": []} and len(held["calls"]) == 2
    save(path, facts | {"commit": "d"}, call(3.0, True, "b"))
    assert json.loads(path.read_text())["lacking"] == {"racecheck": ["a"]}, "another commit begins anew"


def test_kernels_and_their_code():
    run_apart(Path(__file__).with_name("apart_sanitize.py"))
