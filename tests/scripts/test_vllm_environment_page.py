from scripts import make_vllm_environment_page as page


def test_the_page_of_vllm_s_variables_is_up_to_date() -> None:
    assert page.FILE.read_text(encoding="utf-8") == page.page(), "run scripts/make_vllm_environment_page.py"
