"""Results of a GPU run are recorded and shown on a page, as unverified once the source has changed."""

import dataclasses
import json
import shutil

import pytest

from jaxllm.cli import env
from pallas_kernels import verified
from scripts import verified_pages
from scripts.gpu_checks import Outcome, carrying, pages, record, skip
from scripts.gpu_checks.jobs import Hello
from scripts.gpu_checks.parts import PARTS

PASSED = [Outcome(f"{group}: a case, triton", True, "") for group in record.OPS_OF_CASES]
BETWEEN = [Outcome("2 devices: a case", True, ""), skip("4 devices", "2 visible")]
OF_KERNELS = sorted(record.OPS_OF_CASES.values())


def run_of(**outcomes) -> record.Run:
    run = record.Run(commit="abc", hello=Hello("NVIDIA H200", 1, "gpu"))
    for part, found in outcomes.items():
        run.begin(part)
        for outcome in found:
            run.add(part, outcome)
        run.end(part)
    return run


def test_the_pages_and_the_readme_are_what_the_records_and_the_sources_say() -> None:
    records = verified.records()
    expected = {pages.page_name(kind): pages.render_page(kind, found) for kind, found in records.items()}
    folder = pages.ROOT / pages.PAGES
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    assert found == expected, f"an op changed, or a record: run {pages.COMMAND}"
    readme = (pages.ROOT / pages.README).read_text(encoding="utf-8")
    assert pages.readme_sentence(records) in readme.splitlines(), f"run {pages.COMMAND}"


def test_every_op_is_verified_by_a_part_and_every_group_of_kernel_cases_verifies_one() -> None:
    from scripts.kernels import OPS

    assert set(record.OPS_OF_CASES) == set(OPS) and set(record.OPS_OF_PARTS) <= set(PARTS)
    assert sorted(op for ops in record.OPS_OF_PARTS.values() for op in ops) == sorted(verified.OPS)


def test_an_op_is_verified_if_all_its_cases_passed() -> None:
    groups = tuple(record.OPS_OF_CASES)
    assert record.verified_ops(PASSED, groups) == OF_KERNELS
    wrong = Outcome("attention: another, mosaic", False, "")
    assert record.verified_ops([*PASSED, wrong], groups) == [op for op in OF_KERNELS if op != "paged_attention"]
    assert record.verified_ops(PASSED[1:], groups) == [op for op in OF_KERNELS if op != "paged_attention"]
    assert record.verified_ops(PASSED, ["rope"]) == ["rope_cache_write"]
    assert record.verified_ops([*PASSED, Outcome("kernels (1 of 3)", False, "killed")], groups) == []


def test_collectives_are_verified_by_their_own_part() -> None:
    assert list(run_of(collectives=BETWEEN).record()["ops"]) == ["collectives"]
    assert not run_of(collectives=[*BETWEEN, Outcome("2 devices: another", False, "")]).record()["ops"]
    assert not run_of(collectives=BETWEEN[1:]).record()["ops"]
    records = record.merge({}, "NVIDIA H200", run_of(kernels=PASSED, collectives=BETWEEN).record())
    assert list(records["NVIDIA H200"]["ops"]) == list(verified.OPS)
    for later, left in (
        (run_of(kernels=[Outcome("attention: a case", False, "")]), ["collectives"]),
        (run_of(collectives=[Outcome("2 devices: a case", False, "")]), OF_KERNELS),
        (run_of(collectives=BETWEEN[1:]), list(verified.OPS)),
    ):
        assert list(record.merge(records, "NVIDIA H200", later.record())["NVIDIA H200"]["ops"]) == left


def test_skipped_is_neither_passed_nor_failed() -> None:
    run = run_of(kernels=PASSED, tensor_parallel=[skip("2 devices", "1 visible")])
    assert not run.failed and "tensor_parallel 0 of 0 (1 skipped)" in run.summary()
    part = run.record()["parts"]["tensor_parallel"]
    assert (part["passed"], part["failed"], part["skipped"], part["note"]) == (0, 0, 1, "1 visible")
    assert "- Skipped in tensor_parallel: 1 visible." in pages.render_page("NVIDIA H200", run.record())


def test_a_later_run_replaces_its_own_parts_and_what_they_verify() -> None:
    both = run_of(kernels=PASSED, tokens=[Outcome("t", True, "")])
    records = record.merge({}, "NVIDIA H200", both.record())
    later = run_of(tokens=[Outcome("t", False, "")])
    later.commit = "def"
    found = record.merge(records, "NVIDIA H200", later.record())["NVIDIA H200"]
    assert found["commit"] == found["parts"]["tokens"]["commit"] == "def" and found["parts"]["kernels"]["commit"] == "abc"
    assert found["parts"]["tokens"]["failed"] == 1 and list(found["ops"]) == OF_KERNELS
    skipped = record.merge(records, "NVIDIA H200", run_of(tokens=[skip("t", "no")]).record())["NVIDIA H200"]
    assert skipped["parts"]["tokens"]["passed"] == 1
    some = dataclasses.replace(run_of(kernels=[Outcome("rope: a case", False, "")]), ops=("rope",))
    found = record.merge(records, "NVIDIA H200", some.record())["NVIDIA H200"]
    assert found["parts"]["kernels"]["failed"] == 0 and "groups" not in found
    assert list(found["ops"]) == [op for op in OF_KERNELS if op != "rope_cache_write"]
    failing = run_of(kernels=[Outcome(outcome.name, False, "") for outcome in PASSED])
    assert record.merge(records, "NVIDIA H200", failing.record())["NVIDIA H200"]["ops"] == {}


def test_a_record_is_written_merged_and_rendered_again(tmp_path, monkeypatch) -> None:
    files = record.write(run_of(kernels=PASSED), str(tmp_path / "out"))
    assert [path.name for path in files] == ["verified.json", "NVIDIA_H200.md"]
    monkeypatch.setattr(verified, "RECORDS", tmp_path / "verified.json")
    monkeypatch.setattr("sys.argv", ["verified_pages.py", "--merge", str(files[0])])
    monkeypatch.setattr(pages.write_pages, "__defaults__", (tmp_path,))
    (tmp_path / "README.md").write_text(f"# x\n\n{pages.SENTENCE} no device yet.\n")
    verified_pages.main()
    page = (tmp_path / "docs/verified/NVIDIA_H200.md").read_text()
    assert page == files[1].read_text() and page.count("| verified |") == len(OF_KERNELS)
    assert "[NVIDIA H200](docs/verified/)." in (tmp_path / "README.md").read_text()
    assert verified.is_verified("NVIDIA H200", "sampling") and not verified.is_verified("NVIDIA B200", "sampling")


def test_an_op_whose_source_changed_stands_as_unverified(monkeypatch) -> None:
    found = run_of(kernels=PASSED).record()
    digests = {op: verified.source_digest(op) for op in verified.OPS}
    monkeypatch.setattr(verified, "source_digest", lambda op: "changed" if op == "sampling" else digests[op])
    page = pages.render_page("NVIDIA H200", found)
    assert f"| sampling | {digests['sampling']} | changed | unverified since its source changed |" in page
    assert page.count("| verified |") == len(OF_KERNELS) - 1


def test_env_lists_the_devices_with_a_record_and_what_has_changed_since(monkeypatch) -> None:
    records = record.merge({}, "NVIDIA H200", run_of(kernels=PASSED, collectives=BETWEEN).record())
    records = record.merge(records, "NVIDIA H100", run_of(kernels=PASSED).record())
    monkeypatch.setattr(verified, "records", lambda: records)
    found = env.verified_devices()
    assert list(found) == ["NVIDIA H100", "NVIDIA H200"] and found["NVIDIA H200"].startswith("these kernels, ")
    assert found["NVIDIA H100"].startswith("other kernels than these of collectives, ")


def test_only_a_gpu_is_recorded(tmp_path) -> None:
    run = run_of(kernels=PASSED)
    run.meet(Hello("cpu", 1, "cpu"))
    with pytest.raises(SystemExit, match="no GPU was checked"):
        record.write(run, str(tmp_path))
    assert not list(tmp_path.iterdir())
    assert json.dumps(run.record())


def test_a_source_that_makes_the_same_kernels_stays_verified(tmp_path, monkeypatch) -> None:
    now = verified.source_digest("lora")
    record_then = {"versions": {"jax": "1"}, "ops": {"lora": "then", "sampling": "x"}, "parts": {}, "date": "", "commit": ""}
    monkeypatch.setattr(carrying, "header", lambda: {"ops": {"lora": now}})

    def write(name: str, digest: str, *programs: tuple[str, str], jax: str = "1", device: str = "NVIDIA H200"):
        path, header = tmp_path / name, {"device": device, "jax": jax, "ops": {"lora": digest}}
        path.write_text("".join(json.dumps(line) + "\n" for line in (header, *programs)))
        return path

    kernel, plain = ("lora: a: triton", "same"), ("lora: a: xla", "then")
    before = write("before", "then", kernel, plain)
    after = write("after", now, kernel, ("lora: a: xla", "now"), ("lora: b: triton", "new"))
    records = carrying.carry({"NVIDIA H200": record_then}, before, after)
    assert records["NVIDIA H200"]["ops"] == {"lora": now, "sampling": "x"}
    page = pages.render_page("NVIDIA H200", records["NVIDIA H200"])
    assert f"| lora | then | {now} | {pages.SAME_KERNELS} |" in page
    assert "none of the 1 programs" in page and "1 programs of newer cases have not run on it" in page
    with monkeypatch.context() as later:
        later.setattr(verified, "source_digest", lambda op: "later")
        page = pages.render_page("NVIDIA H200", records["NVIDIA H200"])
    assert "| lora | then | later | unverified since its source changed |" in page and "programs" not in page
    carried_again = carrying.carry(records, write("between", now, kernel, ("lora: b: triton", "new")), after)
    again = carried_again["NVIDIA H200"]["carried"]["lora"]
    assert (again["verified"], again["new"]) == ("then", 1), "b has not run yet"
    monkeypatch.setattr(verified, "records", lambda: records)
    assert verified.is_verified("NVIDIA H200", "lora") and not verified.is_verified("NVIDIA H200", "lora", carried=False)
    same = carrying.carry({"NVIDIA H200": record_then}, before, write("same", now, kernel))
    monkeypatch.setattr(verified, "records", lambda: same)
    assert verified.is_verified("NVIDIA H200", "lora", carried=False), "there are no newer cases"
    checked = record.merge(records, "NVIDIA H200", run_of(kernels=PASSED).record())
    assert not checked["NVIDIA H200"]["carried"]
    for wrong, said in (
        (write("changed", now, ("lora: a: triton", "other")), "1 of 1 programs of lora differ"),
        (write("gone", now, ("lora: b: triton", "same")), "1 of 1 programs of lora differ"),
        (write("version", now, kernel, jax="2"), "JAX 1 and 2"),
        (write("source", "other", kernel), "not of these sources"),
        (write("device", now, kernel, device="NVIDIA H100"), "is of an NVIDIA H200"),
    ):
        with pytest.raises(SystemExit, match=said):
            carrying.carry({"NVIDIA H200": record_then, "NVIDIA H100": record_then}, before, wrong)
    with pytest.raises(SystemExit, match="not of the source of lora that was verified"):
        carrying.carry({"NVIDIA H200": record_then}, write("another", "another", kernel), after)


@pytest.mark.parametrize(
    ("changed", "ops"),
    [
        ("row_copies.py", {"gated_matmul": True, "paged_attention": True, "lora": True, "sampling": False}),
        ("grouped_matmul/activation.py", {"gated_matmul": True, "lora": True, "quantized_matmul": False}),
        ("gated_matmul/mosaic.py", {"gated_matmul": True, "grouped_matmul": False}),
    ],
)
def test_a_digest_is_of_the_op_and_of_what_it_names_elsewhere(changed, ops, tmp_path, monkeypatch):
    shutil.copytree(verified.RECORDS.parent, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(verified, "_ROOT", tmp_path / "kernels")
    digest = verified.source_digest.__wrapped__
    before = {op: digest(op) for op in ops}
    path = tmp_path / "kernels" / changed
    path.write_text(path.read_text() + "# changed\n")
    assert {op: digest(op) != before[op] for op in ops} == ops
