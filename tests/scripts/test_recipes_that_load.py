"""The share of vLLM's text recipes whose architectures load."""

from scripts import recipes_that_load


def test_the_share_does_not_fall():
    recipes = recipes_that_load.recipes()
    assert len(recipes) == 121
    assert sum(map(recipes_that_load.loads, recipes.values())) >= 109


def test_a_text_model_must_be_known_too():
    assert recipes_that_load.loads(("StrangeForConditionalGeneration", "LlamaForCausalLM"))
    assert recipes_that_load.loads(("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"))
    assert not recipes_that_load.loads(("Mistral3ForConditionalGeneration", "StrangeForCausalLM"))
    assert not recipes_that_load.loads(("StrangeForConditionalGeneration",))
