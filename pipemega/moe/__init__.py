"""Mixtures of experts: the router, the exchange of tokens between ranks, and the layer of both."""
