from jaxllm.http_client.view_text import sparkline


def test_a_sparkline_is_as_high_as_its_values() -> None:
    assert sparkline([0, 4, 8]) == "▁▅█" and sparkline([0, 0]) == "▁▁" and sparkline([]) == ""
