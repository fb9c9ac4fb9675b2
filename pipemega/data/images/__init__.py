"""Images with a class each.

image_paths      the folders that a config names; without torch
image_files      folders of images, CIFAR's files, digits for trials
image_dataset    samples: (image, class), or (image, shares of classes); the datasets of a run
"""
