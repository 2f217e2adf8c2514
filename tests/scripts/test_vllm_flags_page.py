from scripts import make_vllm_flags_page as page


def test_the_page_of_vllm_s_flags_is_up_to_date() -> None:
    assert page.FILE.read_text(encoding="utf-8") == page.page(), "run scripts/make_vllm_flags_page.py"
