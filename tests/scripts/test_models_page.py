from scripts import make_models_page as page


def test_the_page_of_models_is_up_to_date() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run scripts/make_models_page.py"


def test_every_family_has_a_variant_that_is_tested() -> None:
    for row in page._families():
        assert row.split("|")[4].strip(), row
