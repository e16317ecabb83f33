"""One alphabet of tensor dimensions for the whole package. No other file defines letters.

A tensor's name may carry its shape as a suffix: ``hidden_NBD`` is [blocks, slots, draft width].

=====  =====================================================================================
``T``  packed tokens of one training row (several examples end to end)
``R``  rows of a decoding batch
``N``  anchored blocks
``B``  slots of a block (slot 0 is the anchor)
``C``  context positions, or the capacity of a cache that holds them
``D``  width of the draft
``E``  width of the verifier
``L``  tapped verifier layers
``Y``  draft layers
``Q``  query heads
``K``  key/value heads; behind ``N`` or ``R`` alone, the K proposed slots
``W``  positions run or written at once
``X``  K + 1 verified positions: the anchor and the proposals
``G``  query heads per key/value head (Q = K * G)
``H``  width of a head
``V``  vocabulary
=====  =====================================================================================
"""
