"""Seeded business queries, as text: amounts, dates, percentages, invoices, quarters and small tables, with answers.

Numbers are where rounded weights show first, and text like this is full of them. Money is counted in whole cents and
every answer is computed, so what the texts say is true. ``texts/business.jsonl`` holds some of them beside hand-written
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from random import Random

from labkit.errors import LabError

FIRMS = (
    *("Alder & Finch", "Brightwater Foods", "Corvin Optics", "Delmare Shipping", "Eastgate Tools", "Fjord Textiles"),
    *("Granville Print", "Hollis Bakery", "Ironbridge Cycles", "Juniper Clinic", "Kestrel Freight", "Larkspur Books"),
    *("Marlow Ceramics", "Northway Solar", "Oakline Furniture", "Pemberton Glass", "Quayside Hotels", "Rowan Dairy"),
)
GOODS = (
    *("steel brackets", "office chairs", "toner cartridges", "oak panels", "pallets of tiles", "LED panels"),
    *("bags of flour", "bicycle frames", "packs of filters", "rolls of fabric", "water pumps", "cartons of paper"),
)
REGIONS = ("North", "South", "East", "West")
COSTS = ("travel", "software", "rent", "marketing", "training", "freight", "repairs", "insurance")
CURRENCIES = (("EUR", "USD"), ("GBP", "EUR"), ("CHF", "EUR"), ("EUR", "SEK"))


def business_queries(n: int, seed: int = 0) -> list[str]:
    """n texts of one to five sentences, the same for the same ``n`` and ``seed``; all kinds come up equally often.

    Raises LabError for n below 1.
    """
    if n < 1:
        raise LabError(f"at least one query must be asked for, got {n}")
    rng = Random(seed)
    texts = [KINDS[i % len(KINDS)](rng) for i in range(n)]
    rng.shuffle(texts)
    return texts


def money(cents: int, unit: str = "EUR") -> str:
    """1234567 -> "EUR 12,345.67"."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{unit} {abs(cents) // 100:,}.{abs(cents) % 100:02d}"


def percent(part: int, whole: int) -> str:
    """part of whole, whole > 0, with one decimal, half away from zero: (1, 3) -> "33.3%"."""
    tenths = (2000 * abs(part) + whole) // (2 * whole)
    return f"{'-' if part < 0 and tenths else ''}{tenths // 10}.{tenths % 10}%"


def rounded(numerator: int, denominator: int) -> int:
    """numerator / denominator to the nearest whole, halves up; both above zero."""
    return (2 * numerator + denominator) // (2 * denominator)


def _day(rng: Random) -> date:
    return date(2021, 1, 1) + timedelta(days=rng.randrange(4 * 365))


def _invoice_number(rng: Random, day: date) -> str:
    return f"{rng.choice(('INV', 'R', 'RE', 'SI'))}-{day.year}-{rng.randint(1, 99999):05d}"


def _invoice(rng: Random) -> str:
    quantity, price, rate = rng.randint(3, 480), rng.randint(199, 48999), rng.choice((5, 7, 10, 19, 20, 21))
    net = quantity * price
    tax = rounded(net * rate, 100)
    day, days = _day(rng), rng.choice((10, 14, 21, 30, 45))
    number = _invoice_number(rng, day)
    return (
        f"Invoice {number}, dated {day}: {quantity} {rng.choice(GOODS)} at {money(price)} each, {rate}% VAT, "
        f"payable within {days} days. What does {rng.choice(FIRMS)} owe for {number}, and when? The net amount is "
        f"{money(net)}, VAT comes to {money(tax)}, and {money(net + tax)} is due on {day + timedelta(days=days)}."
    )


def _quarters(rng: Random) -> str:
    firm, year = rng.choice(FIRMS), rng.randint(2018, 2025)
    q = [rng.randint(800, 9900) * 1000 for _ in range(4)]
    a, b = sorted(rng.sample(range(4), 2))
    word = "rose" if q[b] >= q[a] else "fell"
    lines = ", ".join(f"Q{i + 1} {money(100 * v)}" for i, v in enumerate(q))
    return (
        f"{firm}, revenue {year}: {lines}. How did Q{b + 1} {year} compare with Q{a + 1} at {firm}? Revenue {word} by "
        f"{money(100 * abs(q[b] - q[a]))}, or {percent(abs(q[b] - q[a]), q[a])}. The best quarter of {firm} in {year} "
        f"was Q{q.index(max(q)) + 1}, and the year as a whole brought {money(100 * sum(q))}."
    )


def _discount(rng: Random) -> str:
    units, price, rate = rng.randint(40, 900), rng.randint(250, 9900), rng.choice((2, 3, 5, 8, 12, 15))
    bound = rng.choice([b for b in (50, 100, 250, 500) if b <= units + 60])
    full = units * price
    cut = rounded(full * rate, 100) if units >= bound else 0
    reached = "applies" if cut else "does not apply"
    return (
        f"{rng.choice(FIRMS)} offers {rate}% off orders of {bound} units or more. We need {units} {rng.choice(GOODS)} "
        f"at {money(price)}. The rebate {reached} to {units} units, so instead of a list price of {money(full)} "
        f"we pay {money(full - cut)} and save {money(cut)}."
    )


def _table(rng: Random) -> str:
    year, rows = rng.randint(2019, 2025), [(r, rng.randint(20, 990), rng.randint(100, 9999) * 100) for r in REGIONS]
    bound = rng.choice((200, 300, 400, 500))
    wanted = [r for r in rows if r[1] > bound]
    body = "; ".join(f"{r}, {n}, {money(v)}" for r, n, v in rows)
    if wanted:
        first, last = [r[0] for r in wanted[:-1]], wanted[-1][0]
        names = f"{', '.join(first)} and {last}, together" if first else f"{last},"
        answer = f"{names} {sum(r[1] for r in wanted):,} orders worth {money(sum(r[2] for r in wanted))}"
    else:
        answer = f"none, since the largest has {max(r[1] for r in rows)} orders"
    return (
        f"Table sales_{year} (region, orders, amount): {body}. Query: SELECT region, orders, amount FROM sales_{year} "
        f"WHERE orders > {bound}; Result: {answer}."
    )


def _overdue(rng: Random) -> str:
    amount, due, late, rate = rng.randint(20000, 4999999), _day(rng), rng.randint(8, 120), rng.choice((5, 8, 9, 12))
    fee = rounded(amount * rate * late, 36500)
    number = _invoice_number(rng, due)
    return (
        f"{number} over {money(amount)} was due on {due} and {rng.choice(FIRMS)} paid it on "
        f"{due + timedelta(days=late)}. How much interest does {number} bear at {rate}% a year of 365 days? The "
        f"payment came {late} days late, so the interest is {money(fee)} and the total {money(amount + fee)}."
    )


def _exchange(rng: Random) -> str:
    base, quote = rng.choice(CURRENCIES)
    rate = rng.randint(10200, 11900)
    scale = 1000 if quote == "SEK" else 10000
    amount = rng.randint(500, 99000) * 100
    result = rounded(amount * rate, scale)
    shown = f"{rate // scale}.{rate % scale:0{len(str(scale)) - 1}d}"
    return (
        f"On {_day(rng)} one {base} bought {shown} {quote}. {rng.choice(FIRMS)} exchanged {money(amount, base)} at "
        f"this rate and received {money(result, quote)} before fees; a fee of 0.5% takes "
        f"{money(rounded(result, 200), quote)} of it."
    )


def _stock(rng: Random) -> str:
    daily, days, left, lead = rng.randint(4, 90), rng.randint(3, 40), rng.randint(0, 3), rng.randint(4, 25)
    stock = daily * days + left
    order = "order today" if days <= lead else f"order within {days - lead} days"
    item = f"{rng.choice('ABCDEFGH')}{rng.choice('KLMNPRST')}-{rng.randint(100, 9999)}"
    return (
        f"Item {item}: {stock} pieces in stock, {daily} sold a day, delivery takes {lead} days. When must we "
        f"reorder {item}? {stock} divided by {daily} gives {days} full days of cover for {item}, against a lead time "
        f"of {lead} days: {order}."
    )


def _hours(rng: Random) -> str:
    hours, extra, wage = rng.randint(30, 40), rng.randint(1, 14), rng.randint(1350, 5200)
    base, more = hours * wage, rounded(extra * wage * 125, 100)
    return (
        f"Employee {rng.randint(1001, 9899)} worked {hours} regular hours and {extra} hours of overtime in week "
        f"{rng.randint(1, 52)} at {money(wage)} an hour, overtime paid at 125%. Regular pay is {money(base)}, overtime "
        f"{money(more)}, gross pay {money(base + more)}."
    )


def _budget(rng: Random) -> str:
    names, firm, month = rng.sample(COSTS, 3), rng.choice(FIRMS), _day(rng).strftime("%B %Y")
    rows = [(name, rng.randint(40, 900) * 10000, rng.randint(4000, 90000) * 100) for name in names]
    lines = "; ".join(f"{n} planned {money(p)}, spent {money(s)}" for n, p, s in rows)
    over = sum(s for _, _, s in rows) - sum(p for _, p, _ in rows)
    worst = max(rows, key=lambda r: r[2] - r[1])
    tail = (
        f"The largest overrun in {month} was {worst[0]}, with {money(worst[2] - worst[1])}"
        if worst[2] > worst[1]
        else f"No line of {month} went over; {worst[0]} came closest, with {money(worst[1] - worst[2])} left"
    )
    return (
        f"{firm}, {month}: {lines}. In total the three lines of {firm} were {money(abs(over))} "
        f"{'over' if over > 0 else 'under'} budget. {tail}."
    )


def _churn(rng: Random) -> str:
    start, lost, won, year = (
        rng.randint(800, 24000),
        rng.randint(10, 400),
        rng.randint(10, 600),
        rng.randint(2019, 2025),
    )
    return (
        f"{rng.choice(FIRMS)} had {start:,} subscribers at the start of Q{rng.randint(1, 4)} {year}, lost {lost} and "
        f"won {won}. The churn rate is {lost} of {start:,}, which is {percent(lost, start)}, and the closing number "
        f"is {start:,} - {lost} + {won} = {start - lost + won:,}."
    )


def _margin(rng: Random) -> str:
    cost = rng.randint(400, 60000)
    price = rounded(cost * rng.randint(112, 260), 100)
    goods, firm = rng.choice(GOODS), rng.choice(FIRMS)
    return (
        f"{firm} buys {goods} at {money(cost)} and sells them at {money(price)}. The gross profit on each is "
        f"{money(price - cost)}: a markup of {percent(price - cost, cost)} on cost, and a margin of "
        f"{percent(price - cost, price)} of the price."
    )


def _lookup(rng: Random) -> str:
    numbers = sorted(rng.sample(range(10000, 99999), 4))
    rows = [(n, rng.choice(FIRMS), rng.randint(1000, 999999), rng.choice(("paid", "open", "overdue"))) for n in numbers]
    chosen = rng.choice(rows)
    body = "; ".join(f"{n} | {f} | {money(a)} | {s}" for n, f, a, s in rows)
    unpaid = sum(a for _, _, a, s in rows if s != "paid")
    return (
        f"Ledger: {body}. What is the status of invoice {chosen[0]}? Invoice {chosen[0]}, {chosen[1]}, over "
        f"{money(chosen[2])}, is {chosen[3]}; of the four invoices {money(unpaid)} has not been paid."
    )


KINDS: tuple[Callable[[Random], str], ...] = (
    *(_invoice, _quarters, _discount, _table, _overdue, _exchange),
    *(_stock, _hours, _budget, _churn, _margin, _lookup),
)
