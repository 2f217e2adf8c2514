"""Dialogues in which the assistant calls a tool that the system message describes, or reads what a tool returned."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .dialogue import Dialogue, exchange, wording
from .words import COLOURS, DAYS, city, first_name, made_up_word, word


@dataclass(frozen=True)
class Parameter:
    """An argument: its possible names, its type, and its wording in a request."""

    names: tuple[str, ...]
    type: str
    description: str
    phrases: tuple[str, ...]
    value: Callable[[random.Random], Any]


PARAMETERS = (
    Parameter(("city", "location", "place", "town"), "string", "Name of the city", ("in {v}",), city),
    Parameter(("date", "day", "when"), "string", "Day", ("on {v}", "for {v}"), lambda rng: rng.choice(DAYS)),
    Parameter(
        ("time", "hour", "start"),
        "string",
        "Time of day",
        ("at {v}",),
        lambda rng: f"{rng.randint(0, 23)}:{rng.choice(('00', '15', '30', '45'))}",
    ),
    Parameter(
        ("people", "guests", "persons", "group_size"),
        "integer",
        "How many people",
        ("for {v} people", "for {v} persons"),
        lambda rng: rng.randint(2, 40),
    ),
    Parameter(("name", "person", "user", "customer"), "string", "Name of the person", ("for {v}",), first_name),
    Parameter(("topic", "subject", "query", "keyword"), "string", "What it is about", ("about {v}",), word),
    Parameter(
        ("minutes", "duration", "length"),
        "integer",
        "Length in minutes",
        ("for {v} minutes", "of {v} minutes"),
        lambda rng: rng.choice((5, 10, 15, 20, 25, 30, 40, 45, 50, 60, 75, 90, 120)),
    ),
    Parameter(
        ("max_price", "budget", "limit"),
        "integer",
        "Highest price",
        ("under {v} dollars", "for at most {v} dollars"),
        lambda rng: rng.randint(5, 999),
    ),
    Parameter(("colour", "color"), "string", "Colour", ("in {v}",), lambda rng: rng.choice(COLOURS)),
    Parameter(
        ("email", "recipient", "address"),
        "string",
        "Email address",
        ("to {v}",),
        lambda rng: f"{rng.choice((first_name(rng).lower(), made_up_word(rng)))}@{rng.choice(('example.com', 'mail.com'))}",
    ),
    Parameter(
        ("id", "number", "code"),
        "integer",
        "Number of the entry",
        ("with number {v}", "number {v}"),
        lambda rng: rng.randint(1, 9999),
    ),
)

ACTIONS = (
    ("get_weather", "weather", ("What is the weather", "How is the weather", "Get the weather", "Show me the weather")),
    ("book_hotel", "hotel room", ("Book a hotel room", "Reserve a hotel", "I need a hotel room", "Find me a hotel")),
    ("book_table", "table in a restaurant", ("Book a table", "Reserve a table", "I want a table")),
    ("find_flights", "flights", ("Find flights", "Search for flights", "Look for a flight")),
    ("order_taxi", "taxi", ("Order a taxi", "Call a taxi", "I need a taxi", "Get me a taxi")),
    ("order_pizza", "pizza", ("Order a pizza", "Order pizza", "Get me a pizza")),
    ("send_email", "email", ("Send an email", "Write an email", "Mail a message")),
    ("send_invoice", "invoice", ("Send an invoice", "Send the invoice", "Issue an invoice")),
    ("create_event", "calendar event", ("Create an event", "Add an event", "Put an event in my calendar")),
    ("set_timer", "timer", ("Set a timer", "Start a timer")),
    ("set_alarm", "alarm", ("Set an alarm", "Set the alarm", "Wake me up")),
    ("search_web", "web pages", ("Search the web", "Look on the web", "Search for pages")),
    ("search_books", "books", ("Find books", "Search for books", "Look for a book")),
    ("find_recipe", "recipe", ("Find a recipe", "Look up a recipe", "Search for a recipe")),
    ("play_music", "music", ("Play music", "Play some music", "Start the music")),
    ("get_news", "news", ("Get the news", "Show me the news", "What is the news")),
    ("buy_ticket", "ticket", ("Buy a ticket", "Get a ticket", "I need a ticket")),
    ("rent_car", "car to rent", ("Rent a car", "I want to rent a car", "Hire a car")),
    ("rent_bike", "bicycle to rent", ("Rent a bike", "Rent a bicycle")),
    ("find_shop", "shop", ("Find a shop", "Look for a shop", "Where is a shop")),
    ("schedule_meeting", "meeting", ("Schedule a meeting", "Plan a meeting", "Set up a meeting", "Arrange a meeting")),
    ("cancel_order", "order", ("Cancel the order", "Cancel my order")),
    ("track_parcel", "parcel", ("Track the parcel", "Where is my parcel", "Track my parcel")),
    ("create_note", "note", ("Create a note", "Write a note", "Make a note")),
    ("turn_on_light", "lamp", ("Turn on the light", "Switch on the light")),
    ("translate_text", "translation", ("Translate the text", "Translate a text")),
    ("get_stock_price", "stock price", ("Get the stock price", "What is the stock price")),
    ("find_doctor", "doctor", ("Find a doctor", "Look for a doctor", "I need a doctor")),
    ("reserve_seat", "seat", ("Reserve a seat", "Book a seat")),
    ("rent_boat", "boat", ("Rent a boat", "Hire a boat")),
    ("paint_wall", "wall", ("Paint the wall", "Paint a wall")),
    ("open_door", "door", ("Open the door",)),
)


@dataclass(frozen=True)
class Tool:
    """A tool: its action and its parameters with the names they go by here."""

    action: tuple[str, str, tuple[str, ...]]
    parameters: tuple[tuple[str, Parameter], ...]
    bare: bool
    """Whether its schema leaves the descriptions out."""

    def schema(self) -> dict[str, Any]:
        """The tool as the OpenAI API describes it."""
        properties = {}
        for name, parameter in self.parameters:
            properties[name] = {"type": parameter.type} | ({} if self.bare else {"description": parameter.description})
        arguments = {"type": "object", "properties": properties, "required": [self.parameters[0][0]]}
        about = {} if self.bare else {"description": f"{self.action[0].split('_')[0].capitalize()} a {self.action[1]}"}
        return {"type": "function", "function": {"name": self.action[0], **about, "parameters": arguments}}


def _tools(rng: random.Random, count: int) -> list[Tool]:
    bare = rng.random() < 0.4
    tools = []
    for action in rng.sample(ACTIONS, count):
        chosen = rng.sample(PARAMETERS, rng.choice((1, 2, 2, 3)))
        tools.append(Tool(action, tuple((rng.choice(parameter.names), parameter) for parameter in chosen), bare))
    return tools


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the assistant writes it (the Hermes convention)."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def _request(rng: random.Random, tool: Tool) -> tuple[str, dict[str, Any]]:
    """A request that the tool serves and the arguments it names; the required one is always there."""
    used = [entry for place, entry in enumerate(tool.parameters) if place == 0 or rng.random() < 0.8]
    values = {name: parameter.value(rng) for name, parameter in used}
    said = [rng.choice(parameter.phrases).format(v=values[name]) for name, parameter in used]
    rng.shuffle(said)
    opening = rng.choice(tool.action[2])
    ending = "?" if opening.startswith(("What", "How", "Where")) else "."
    return wording(rng, (f"{opening} {' '.join(said)}{ending}",)), values


def tool_call(rng: random.Random) -> Dialogue:
    """A request that one of one to three tools serves."""
    tools = _tools(rng, rng.choice((1, 2, 2, 3)))
    tool = rng.choice(tools)
    question, values = _request(rng, tool)
    single = exchange("tool_call", question, call_text(tool.action[0], values))
    keys = (f"tool_call|{tool.action[0]}|{json.dumps(values)}",)
    return Dialogue("tool_call", single.messages, keys, tuple(entry.schema() for entry in tools))


_RESULTS: tuple[tuple[str, Callable[[random.Random], Any]], ...] = (
    ("status", lambda rng: rng.choice(("ok", "done", "booked", "sent", "open", "closed"))),
    ("temperature", lambda rng: rng.randint(-9, 39)),
    ("sky", lambda rng: rng.choice(("clear", "cloudy", "rainy", "snowy", "windy"))),
    ("price", lambda rng: rng.randint(1, 999)),
    ("id", lambda rng: rng.randint(100, 9999)),
    ("city", city),
    ("name", first_name),
    ("title", word),
)


def tool_answer(rng: random.Random) -> Dialogue:
    """A tool's result, reported to the user."""
    called = tool_call(rng)
    result = {name: make(rng) for name, make in rng.sample(_RESULTS, rng.randint(1, 3))}
    told = ", ".join(f"{name} {value}" for name, value in result.items())
    messages = (
        *called.messages,
        {"role": "tool", "content": json.dumps(result)},
        {"role": "assistant", "content": f"Here is the result: {told}."},
    )
    return Dialogue("tool_answer", messages, (*called.keys, f"tool_answer|{json.dumps(result)}"), called.tools)


def tool_not_needed(rng: random.Random, other: Dialogue) -> Dialogue:
    """Another dialogue in the presence of tools that do not help."""
    return Dialogue(other.kind, other.messages, other.keys, tuple(tool.schema() for tool in _tools(rng, rng.randint(1, 2))))
