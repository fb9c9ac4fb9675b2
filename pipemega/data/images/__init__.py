"""Images with a class each.

cifar, image_folder, drawn_digits      where they come from
labelled_images                        images of one source, before they are transformed
image_transform, image_dataset         samples: (image, class), or (image, shares of classes)
build_images                           the datasets of a run, from the config section `data`
"""
