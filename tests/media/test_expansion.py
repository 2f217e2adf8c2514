import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.request import EngineCoreRequest
from jaxllm.sampling_params import SamplingParams
from tests.helpers.images import END_ID, media, picture, processor

IMAGE = 500


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return processor(tmp_path_factory.mktemp("model"), mm_processor_kwargs={"min_pixels": 1024})


def processed(qwen, *sizes: tuple[int, int]):
    return [qwen.process(media(picture(*size, seed))) for seed, size in enumerate(sizes)]


def test_each_placeholder_becomes_the_tokens_of_its_image(qwen) -> None:
    images = processed(qwen, (64, 32), (32, 96))
    ids, items = qwen.expand([1, IMAGE, 2, 3, IMAGE], images)
    assert ids == [1, *[IMAGE] * 2, 2, 3, *[IMAGE] * 3]
    assert [(item.position, item.num_tokens, item.grid) for item in items] == [(1, 2, (1, 1, 2)), (5, 3, (1, 3, 1))]
    for item, image in zip(items, images, strict=True):
        assert item.kind == "image" and item.payload is image.payload and item.content_hash == image.content_hash
        assert item.embedding_runs == ()
    EngineCoreRequest(request_id="r", prompt_token_ids=ids, items=items, sampling_params=SamplingParams())


def test_neighbours_are_expanded_each(qwen) -> None:
    images = processed(qwen, (64, 32), (64, 32))
    ids, items = qwen.expand([IMAGE, IMAGE], images)
    assert ids == [IMAGE] * 4 and [item.position for item in items] == [0, 2]


def test_an_expanded_prompt_stays_as_it_is(qwen) -> None:
    images = processed(qwen, (64, 32), (32, 96), (64, 64))
    once, items = qwen.expand([1, IMAGE, 2, IMAGE, IMAGE, 3], images)
    assert qwen.expand(once, images) == (once, items)
    lone = processed(qwen, (32, 32))
    assert qwen.expand([IMAGE], lone)[0] == [IMAGE]


def test_a_prompt_without_images_stays_as_it_is(qwen) -> None:
    prompt = [1, 2, 3]
    assert qwen.expand(prompt, []) == (prompt, ())


@pytest.mark.parametrize(
    ("prompt", "sizes", "text"),
    [
        (
            [1, 2],
            [(64, 32)],
            r"has 0 image placeholder\(s\) \(token 500\) and 1 image\(s\); .* or 2, as many as their embeddings \(2\)",
        ),
        (
            [IMAGE],
            [],
            r"has 1 image placeholder\(s\) \(token 500\) and 0 image\(s\); it must have one placeholder for each image$",
        ),
        (
            [IMAGE],
            [(64, 32), (64, 64)],
            r"has 1 image placeholder.* and 2 image\(s\); .* or 6, as many as their embeddings \(2, 4\)",
        ),
        ([IMAGE] * 3, [(64, 32)], r"has 3 image placeholder.* and 1 image"),
        (
            [1, IMAGE, 1, IMAGE],
            [(64, 32)],
            "has image placeholders at token 1, but not the 2 tokens that stand for image 1, of 2 embeddings",
        ),
        (
            [IMAGE] * 3 + [1] + [IMAGE] * 3,
            [(64, 32), (64, 64)],
            "placeholders at token 2, but not the 4 tokens .* image 2, of 4 embeddings",
        ),
        ([IMAGE], [(64, 32)] * 9, r"\(2, 2, 2, 2, 2, 2, 2, 2, …\)"),
    ],
)
def test_other_counts_are_refused_with_both(qwen, prompt: list[int], sizes: list[tuple[int, int]], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text) as caught:
        qwen.expand(prompt, processed(qwen, *sizes))
    assert caught.value.param == "prompt"


def test_a_row_of_pixtral_may_be_expanded_already(tmp_path) -> None:
    pixtral = processor(tmp_path, "pixtral")
    for sizes in ([(84, 56), (28, 84)], [(28, 28)], [(28, 28), (84, 28)]):
        images = processed(pixtral, *sizes)
        once, items = pixtral.expand([1, *[IMAGE] * len(images), 2], images)
        assert len(once) == 2 + sum(image.num_tokens for image in images) and once[-2] == END_ID
        assert pixtral.expand(once, images) == (once, items)
    images = processed(pixtral, (84, 56))
    with pytest.raises(InvalidRequestError, match="not the 8 tokens that stand for image 1, of 6 embeddings"):
        pixtral.expand([IMAGE] * 6, images)
