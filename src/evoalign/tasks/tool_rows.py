# SPDX-License-Identifier: Apache-2.0
"""Functions of the task `tool_calls`, and requests for them with their right calls.

Dates and times are written in requests as they are wanted, so that a call needs reading and no conversion of formats:
units (an hour and a half is 90 minutes), lengths from a begin and an end, enumerations in other words, omitted
arguments, lists, nested objects, and facts that do not belong to the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, TypeAlias

from evoalign.tasks.generated import NAMES, Draw

Request: TypeAlias = tuple[str, dict[str, Any]]
"""A request and the right arguments."""
CITIES = (
    "Lisbon", "Oslo", "Vienna", "Porto", "Madrid", "Berlin", "Dublin", "Athens", "Prague", "Warsaw", "Lyon", "Turin",
)  # fmt: skip
COUNTS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
ASIDES = (
    "I only have {} minutes right now.", "My last request was number {}.", "I have asked {} people about it.",
    "There are {} messages waiting for me.", "I am on platform {}.", "Bus {} is about to leave.",
)  # fmt: skip
"""Sentences that no function needs."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function: its name, its purpose, its arguments with their types, and the requests for it."""

    name: str
    purpose: str
    arguments: dict[str, Any]
    draw: Callable[[Draw], Request]

    def make(self, draw: Draw) -> Request:
        """Return a request, in half of the cases with a sentence that does not matter, and the right arguments."""
        request, arguments = self.draw(draw)
        if draw.chance(50):
            aside = draw.one(ASIDES).format(draw.number(3, 40))
            request = f"{aside} {request}" if draw.chance(50) else f"{request} {aside}"
        return request, arguments


def schemas(functions: Sequence[Function]) -> str:
    """Return the schemas of functions, each in a line of JSON."""
    found = [{"name": f.name, "description": f.purpose, "arguments": f.arguments} for f in functions]
    return "\n".join(json.dumps(one, ensure_ascii=False) for one in found)


def _day(draw: Draw) -> date:
    return date(2027, 1, 1) + timedelta(draw.number(0, 700))


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _time(draw: Draw, low: int = 7, high: int = 20) -> str:
    return _clock(draw.number(low * 60, high * 60, 5))


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _count(number: int, thing: str) -> str:
    """Write a number of things, as a word up to twelve."""
    return f"{COUNTS[number] if number < len(COUNTS) else number} {thing}{'' if number == 1 else 's'}"


def _length(draw: Draw, minutes: int) -> str:
    """Write a duration in hours, if it has some."""
    hours, rest = divmod(minutes, 60)
    if not hours:
        return "half an hour" if minutes == 30 and draw.chance(50) else f"{minutes} minutes"
    if rest == 30:
        return "an hour and a half" if hours == 1 else f"{COUNTS[hours]} and a half hours"
    return _count(hours, "hour") + (f" and {rest} minutes" if rest else "")


def _event(draw: Draw) -> Request:
    title = draw.one(("Budget review", "Team lunch", "Design workshop", "Yearly talk", "Planning", "Demo for sales"))
    day, start, minutes = _day(draw), draw.number(7 * 60, 18 * 60, 5), draw.number(15, 180, 15)
    guests = draw.some(NAMES, draw.number(0, 3))
    how = draw.number(0, 2)
    spoken = f'Put "{title}" on my calendar for {day}'
    spoken += (
        f" from {_clock(start)} to {_clock(start + minutes)}",
        f" at {_clock(start)}; it takes {_length(draw, minutes)}",
        f" at {_clock(start)}",
    )[how]
    spoken += f", together with {_listed(guests)}." if guests else "."
    online = draw.chance(40)
    spoken += draw.one((" We meet in a video call.", " Everybody joins from home.")) if online else ""
    if draw.chance(40):
        other = draw.one([name for name in NAMES if name not in guests])
        spoken += draw.one((f" {other} cannot come.", f" It does not concern {other}."))
    arguments = {"title": title, "date": str(day), "start": _clock(start), "minutes": 30 if how == 2 else minutes}
    return spoken, {**arguments, "guests": guests, "online": online}


def _message(draw: Draw) -> Request:
    people = draw.some(NAMES, draw.number(1, 3))
    text = draw.one(("The train is late", "Lunch is ready", "Please call me back", "The door code has changed",
                     "Your parcel is here", "We start without you"))  # fmt: skip
    verb, where, channel = draw.one((
        ("Text", "", "sms"), ("Tell", "", "email"), ("Mail", "", "email"), ("Write to", " in the chat", "chat"),
    ))  # fmt: skip
    spoken, urgent = f'{verb} {_listed(people)}{where}: "{text}".', draw.chance(35)
    spoken += draw.one((" It cannot wait.", " This is an emergency.")) if urgent else ""
    later = None
    if draw.chance(45):
        later = {"date": str(_day(draw)), "time": _time(draw)}
        spoken += f" Send it on {later['date']} at {later['time']} and not before."
    return spoken, {"to": people, "channel": channel, "text": text, "urgent": urgent, "send_at": later}


def _transfer(draw: Draw) -> Request:
    currency, many, small = draw.one(
        (("EUR", "euros", "cents"), ("USD", "dollars", "cents"), ("GBP", "pounds", "pence"))
    )
    whole, part = draw.number(20, 900), draw.one((0, 0, 5, 20, 50, 75))
    name, account = draw.one(NAMES), draw.one(("checking", "checking", "savings", "business"))
    value, spoken = whole + part / 100 if part else whole, f"{whole} {many}" + (f" and {part} {small}" if part else "")
    if draw.chance(30):
        each, days = draw.number(15, 60), draw.number(2, 6)
        value, spoken = each * days, f"{each} {many} for each of {COUNTS[days]} days"
    if draw.chance(30):
        gone = draw.number(10, 99)
        spoken += f" (and not {gone} {many}, as I said first)"
    note = draw.one(("", "", "rent", "concert tickets", "thank you"))
    request = f"Send {name} {spoken}"
    request += {"checking": "", "savings": " from my savings", "business": " from the company's account"}[account]
    request += f' with the note "{note}".' if note else "."
    return request, {"from": account, "to": name, "amount": {"value": value, "currency": currency}, "note": note}


def _hotel(draw: Draw) -> Request:
    city, day, nights = draw.one(CITIES), _day(draw), draw.number(1, 9)
    who, adults, children = draw.one((
        ("me", 1, 0), ("my wife and me", 2, 0), ("the two of us and our baby", 2, 1), ("three adults", 3, 0),
        ("me and my three kids", 1, 3), ("my parents, my little son and me", 3, 1),
    ))  # fmt: skip
    room = draw.one(("double", "double", "single", "suite"))
    spoken = f"Find a hotel in {city} for {who}, "
    if draw.chance(50):
        spoken += f"arriving on {day} and leaving on {day + timedelta(nights)}."
    else:
        nights = draw.one((nights, 7, 14))
        length = {7: "a week", 14: "two weeks"}.get(nights, _count(nights, "night"))
        spoken += f"{length} from {day}."
    spoken += {"double": "", "single": " A single room will do.", "suite": " We want a suite."}[room]
    meal = draw.number(0, 3)
    spoken += ("", "", " Breakfast should be included.", " We have breakfast elsewhere.")[meal]
    guests = {"adults": adults, "children": children}
    return spoken, {
        "city": city, "check_in": str(day), "nights": nights, "guests": guests, "room": room, "breakfast": meal == 2,
    }  # fmt: skip


def _thermostat(draw: Draw) -> Request:
    rooms = draw.some(("kitchen", "hall", "bedroom", "office", "bathroom", "attic"), draw.number(1, 3))
    base, change = draw.number(15, 22), draw.number(1, 5)
    how = draw.number(0, 2)
    spoken = (
        f"Set the {_listed(rooms)} to {base} degrees",
        f"It is {base} degrees in the {_listed(rooms)}: make it {_count(change, 'degree')} warmer",
        f"It is {base} degrees in the {_listed(rooms)}: make it {_count(change, 'degree')} cooler",
    )[how]
    until = _time(draw, 9, 23) if draw.chance(50) else None
    spoken += f" until {until}." if until else "."
    fan = draw.one(("off", "off", "low", "high"))
    spoken += {"off": "", "low": " Let the fan run gently.", "high": " The fan at full power, please."}[fan]
    return spoken, {"rooms": rooms, "celsius": base + (0, change, -change)[how], "until": until, "fan": fan}


def _food(draw: Draw) -> Request:
    place = draw.one(("Luigi", "Lotus Garden", "Taco Casa", "Green Bowl", "Olive Tree"))
    dishes = draw.some(("pizza", "salad", "soup", "burrito", "wrap", "bagel", "lemonade"), draw.number(1, 3))
    counts = [draw.number(1, 6) for _ in dishes]
    items = [{"dish": dish, "count": count} for dish, count in zip(dishes, counts, strict=True)]
    how, delivery = draw.one((
        ("", True), (" Bring it to my door.", True), (" I will fetch it myself.", False), (" We will come by.", False),
    ))  # fmt: skip
    spoken = f"Get {_listed([_count(c, dish) for dish, c in zip(dishes, counts, strict=True)])} from {place}.{how}"
    if draw.chance(40):
        more = draw.number(1, 2)
        spoken += f" Oh, and {_count(more, dishes[0])} more."
        items[0]["count"] = counts[0] + more
    tip = draw.one((0, 0, 2, 3, 5))
    spoken += f" Tip them {tip} euros." if tip else ""
    return spoken, {"restaurant": place, "items": items, "delivery": delivery, "tip": tip}


def _flight(draw: Draw) -> Request:
    start, end, other = draw.some(CITIES, 3)
    day = _day(draw)
    back = day + timedelta(draw.number(2, 20)) if draw.chance(50) else None
    people, passengers = draw.one((("", 1), (f" for {draw.one(NAMES)} and me", 2), (" for the four of us", 4)))
    spoken = draw.one((
        f"I need to get from {start} to {end} on {day}", f"Look for flights to {end} on {day}, leaving from {start}",
    )) + people  # fmt: skip
    spoken += f", and back on {back}." if back else "."
    cabin = draw.one(("economy", "economy", "business", "first"))
    spoken += {"economy": "", "business": " I fly business class.", "first": " First class only."}[cabin]
    direct = draw.chance(40)
    spoken += " I do not want to change planes." if direct else f" Last time I flew via {other}."
    return spoken, {
        "from": start, "to": end, "date": str(day), "return_date": str(back) if back else None,
        "passengers": passengers, "cabin": cabin, "direct": direct,
    }  # fmt: skip


def _workout(draw: Draw) -> Request:
    verb, activity = draw.one(
        (("ran", "run"), ("jogged", "run"), ("swam", "swim"), ("cycled", "ride"), ("biked", "ride"))
    )
    meters, minutes = draw.number(600, 9900, 100), draw.number(20, 150, 5)
    distance = f"{meters / 1000:g} km" if draw.chance(70) else f"{meters} m"
    day, feeling = _day(draw), draw.one(("", "", " It was tough.", " That was nothing for me."))
    effort = {" It was tough.": "hard", " That was nothing for me.": "easy"}.get(feeling, "medium")
    spoken = f"On {day} I {verb} {distance} in {_length(draw, minutes)}.{feeling}"
    if draw.chance(40):
        spoken += f" The week before it was only {draw.number(300, 500, 100)} m."
    return spoken, {
        "activity": activity, "date": str(day), "minutes": minutes, "meters": meters, "effort": effort,
    }  # fmt: skip


def _ride(draw: Draw) -> Request:
    places = ("Central Station", "North Airport", "City Museum", "Hill Hospital", "Old Harbour", "Green Park")
    start, end, *stops = draw.some(places, draw.number(2, 4))
    passengers, who = draw.one(((1, ""), (2, " for my sister and me"), (5, " for the five of us")))
    vehicle = draw.one(("standard", "standard", "van", "luxury"))
    spoken = f"I need a car{who} from {start} to {end}" + (f", stopping at {_listed(stops)}." if stops else ".")
    spoken += {"standard": "", "van": " It has to be a van, for big boxes.", "luxury": " A fancy one!"}[vehicle]
    at = _time(draw) if draw.chance(50) else None
    spoken += f" It should come at {at}." if at else ""
    return spoken, {
        "route": {"pickup": start, "dropoff": end, "stops": stops}, "passengers": passengers, "vehicle": vehicle,
        "time": at,
    }  # fmt: skip


def _invoice(draw: Draw) -> Request:
    customer, days = draw.one(NAMES), draw.one((30, 30, 7, 14, 45))
    items = draw.some(("chair", "lamp", "desk", "shelf unit", "cable", "monitor"), draw.number(1, 3))
    sold = [(item, draw.number(1, 9), draw.number(5, 300)) for item in items]
    lines = [{"item": item, "quantity": count, "unit_price": price} for item, count, price in sold]
    spoken = f"Bill {customer} for "
    spoken += _listed([f"{_count(count, item)} at {price} euros each" for item, count, price in sold]) + "."
    due = {7: " a week", 14: " two weeks", 45: " 45 days"}
    spoken += f" They have{due[days]} to pay." if days != 30 else ""
    discount = draw.one((0, 0, 10, 25))
    spoken += f" Take {discount} percent off." if discount else ""
    return spoken, {"customer": customer, "lines": lines, "due_days": days, "discount_percent": discount}


def _medication(draw: Draw) -> Request:
    medicine, dose = draw.one(("Ibuprofen", "Metformin", "Amoxicillin", "Naproxen")), draw.number(100, 1500, 50)
    amount = f"{dose} mg" if draw.chance(40) else f"{dose / 1000:g} g"
    times = sorted({_time(draw, 6, 22) for _ in range(draw.number(1, 3))})
    days, food = draw.one((7, 14, 10, 5)), draw.number(0, 2)
    length = {7: "a week", 14: "two weeks"}.get(days, f"{days} days")
    spoken = f"Remind me to take {amount} of {medicine} at {_listed(times)} for {length}."
    spoken += ("", " Always with a meal.", " It does not matter whether I eat.")[food]
    return spoken, {"medicine": medicine, "dose_mg": dose, "times": times, "days": days, "with_food": food == 1}


def _rental(draw: Draw) -> Request:
    category, need = draw.one(
        (("compact", "a small car"), ("suv", "an SUV"), ("truck", "something to move a sofa with"))
    )
    city, other = draw.some(CITIES, 2)
    day, days = _day(draw), draw.one((2, 3, 5, 7, 14))
    length = {7: "a week", 14: "two weeks"}.get(days, _count(days, "day"))
    extras = draw.some(("child seat", "roof box", "snow chains", "bike rack"), draw.number(0, 2))
    spoken = f"Rent me {need} in {city} from {day} for {length}" + (f", with {_listed(extras)}." if extras else ".")
    one_way = draw.chance(40)
    spoken += f" I will leave it in {other}." if one_way else ""
    insured = draw.chance(40)
    spoken += draw.one((" Full insurance, please.", " Insure it.")) if insured else ""
    places = {"pickup": city, "dropoff": other if one_way else city}
    return spoken, {
        "category": category, "places": places, "date": str(day), "days": days, "extras": extras, "insurance": insured,
    }  # fmt: skip


FUNCTIONS = (
    Function("create_event", "Put an event on the calendar.", {
        "title": "string", "date": "date", "start": "time", "minutes": "integer, length; default 30",
        "guests": "list of names; default []", "online": "boolean; default false",
    }, _event),
    Function("send_message", "Send a message to people.", {
        "to": "list of names", "channel": "email, sms or chat; default email", "text": "string",
        "urgent": "boolean; default false", "send_at": "{date, time}; default null (at once)",
    }, _message),
    Function("transfer_money", "Transfer money to somebody.", {
        "from": "checking, savings or business; default checking", "to": "name",
        "amount": {"value": "number", "currency": "EUR, USD or GBP"}, "note": "string; default \"\"",
    }, _transfer),
    Function("book_hotel", "Book a room in a hotel.", {
        "city": "string", "check_in": "date", "nights": "integer",
        "guests": {"adults": "integer", "children": "integer"},
        "room": "single, double or suite; default double", "breakfast": "boolean; default false",
    }, _hotel),
    Function("set_thermostat", "Set the temperature of rooms.", {
        "rooms": "list of strings", "celsius": "integer", "until": "time; default null",
        "fan": "off, low or high; default off",
    }, _thermostat),
    Function("order_food", "Order food from a restaurant.", {
        "restaurant": "string", "items": [{"dish": "string, singular", "count": "integer"}],
        "delivery": "boolean; default true", "tip": "integer; default 0",
    }, _food),
    Function("search_flights", "Search for flights.", {
        "from": "city", "to": "city", "date": "date", "return_date": "date; default null",
        "passengers": "integer; default 1", "cabin": "economy, business or first; default economy",
        "direct": "boolean; default false",
    }, _flight),
    Function("log_workout", "Record a workout.", {
        "activity": "run, swim or ride", "date": "date", "minutes": "integer", "meters": "integer",
        "effort": "easy, medium or hard; default medium",
    }, _workout),
    Function("order_ride", "Order a car with a driver.", {
        "route": {"pickup": "string", "dropoff": "string", "stops": "list of strings; default []"},
        "passengers": "integer; default 1", "vehicle": "standard, van or luxury; default standard",
        "time": "time; default null (at once)",
    }, _ride),
    Function("create_invoice", "Write an invoice.", {
        "customer": "name", "lines": [{"item": "string, singular", "quantity": "integer", "unit_price": "number"}],
        "due_days": "integer; default 30", "discount_percent": "integer; default 0",
    }, _invoice),
    Function("add_medication", "Add a reminder for a medicine.", {
        "medicine": "string", "dose_mg": "integer, per time", "times": "list of times", "days": "integer",
        "with_food": "boolean; default false",
    }, _medication),
    Function("rent_vehicle", "Rent a vehicle.", {
        "category": "compact, suv or truck", "places": {"pickup": "city", "dropoff": "city; default: as pickup"},
        "date": "date", "days": "integer", "extras": "list of strings; default []",
        "insurance": "boolean; default false",
    }, _rental),
)  # fmt: skip
SEEN, UNSEEN = FUNCTIONS[:8], FUNCTIONS[8:]
"""Functions of all splits, and functions of test rows alone: no other prompt has their schemas."""
SCHEMAS = {False: schemas(SEEN), True: schemas([*SEEN[4:], *UNSEEN])}
"""Schemas in a prompt, by whether its function is unseen. They are fixed, so that prompts share a beginning."""
