"""Answers judged in pairs, by single elimination.  --group-rm --custom-rm-path examples/hooks/reward_tournament.py"""

import asyncio


async def tournament(num_players, beats):
    """Rank players 0..n-1, given from the strongest seed to the weakest: 0 for the winner, then by how far each came.

    ``await beats(a, b)`` says whether a wins. Where no power of two is there, the top seeds have a bye in the first round.
    """
    players, left = list(range(num_players)), []
    num_byes = 2 ** max(0, num_players - 1).bit_length() - num_players
    while len(players) > 1:
        byes, playing = players[:num_byes], players[num_byes:]
        pairs = [(playing[i], playing[-1 - i]) for i in range(len(playing) // 2)]
        wins = await asyncio.gather(*(beats(a, b) for a, b in pairs))
        left.append([b if won else a for (a, b), won in zip(pairs, wins, strict=True)])
        players = sorted(byes + [a if won else b for (a, b), won in zip(pairs, wins, strict=True)])
        num_byes = 0
    ranks = dict.fromkeys(players, 0)
    for rank, losers in enumerate(reversed(left), start=1):
        ranks |= dict.fromkeys(losers, rank)
    return [ranks[player] for player in range(num_players)]


async def custom_rm(args, samples, **kwargs):
    """A cheap score seeds, a judge decides; rewards of a prompt add up to zero."""
    order = sorted(range(len(samples)), key=lambda i: samples[i].response_length)

    async def beats(a, b):
        """Ask your judge here; this one prefers the answer with more digits, and the better seed in a draw."""
        first, second = (sum(map(str.isdigit, samples[order[i]].response)) for i in (a, b))
        return first > second or (first == second and a < b)

    by_seed = await tournament(len(samples), beats)
    ranks = {order[seed]: rank for seed, rank in enumerate(by_seed)}
    mean = sum(by_seed) / len(by_seed)
    return [mean - ranks[i] for i in range(len(samples))]
