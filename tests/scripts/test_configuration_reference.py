from scripts import make_configuration_reference as page


def test_the_configuration_reference_is_up_to_date() -> None:
    assert page.FILE.read_text(encoding="utf-8") == page.reference(), "run scripts/make_configuration_reference.py"
