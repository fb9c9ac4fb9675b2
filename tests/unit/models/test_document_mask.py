"""The mask of documents: which positions see each other, and when it is computed again."""

import gc

import torch

from pipemega.models import attention as module
from pipemega.models.attention import document_mask, documents_of


def test_a_document_starts_where_the_positions_do_not_continue() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [3, 4, 0, 1, 2, 3]])
    assert documents_of(positions, None).tolist() == [[0, 0, 0, 1, 2, 2], [0, 0, 1, 1, 1, 1]]
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
    assert documents_of(None, mask).tolist() == [[0, 0, 0, 0, 0, -1], [-1, 0, 0, 0, 0, 0]]
    assert documents_of(positions, mask).tolist() == [[0, 0, 0, 1, 2, -1], [-1, 0, 1, 1, 1, 1]]
    assert documents_of(None, None) is None


def test_a_position_sees_itself_and_the_earlier_ones_of_its_document() -> None:
    seen = document_mask(torch.tensor([[0, 0, 1, 1]]))
    assert seen.shape == (1, 1, 4, 4)
    assert seen[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_layers_share_a_mask_until_the_documents_change_or_are_freed() -> None:
    documents = torch.tensor([[0, 0, 1]])
    first = document_mask(documents)
    assert document_mask(documents) is first
    documents[0, 1] = 1
    assert document_mask(documents)[0, 0, 1].tolist() == [False, True, False]
    del documents
    gc.collect()
    assert module._kept is None


def test_a_mask_made_in_inference_mode_can_be_used_in_training() -> None:
    documents = torch.tensor([[0, 1]])
    with torch.inference_mode():
        document_mask(documents)
    assert not document_mask(documents).is_inference()
    with torch.inference_mode():
        assert document_mask(torch.tensor([[0, 1]]))[0, 0, 1].tolist() == [False, True]
