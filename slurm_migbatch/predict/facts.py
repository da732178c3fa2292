"""Hold public specifications of models, which the physical prior starts from. Sites add their own as JSON.

Parameters and multiply-adds of the models for classification are torchvision's published figures (its model pages; one
multiply-add counts as two operations here), of Swin-L, DeiT and EVA-02 timm's (results/benchmark-infer-*.csv and its
model cards), of DETR its paper's (arXiv 2005.12872, table 1, at 800 x 1066); those of detection, segmentation and the
rows after them were counted by PyTorch, as `measurements/model_facts.py` does; those of language models follow from
their published configurations (layers, width, parameters), with two operations per parameter and token plus the
attention term. Kernels (launches of one forward pass) and the activations of all layers are our estimates from the same
configurations, of counted models 0.7 of the kernels that ran, as of the others, and the outputs of all layers. The live
activations of images were measured: the growth of PyTorch's peak with the batch, in inference in 32 bits on an H100; of
EVA-02 they are, as of the measured ViTs, 13 widths of a token; where the table says so they were counted. What training
keeps of an image is counted by PyTorch 2.14, torchvision 0.29, timm 1.0 and transformers 5 without a GPU, in 32 bits:
the growth of the tensors of a step that are alive at once, with attention that does not keep its scores where the
network has that. A process takes more (what the allocator keeps free, scores that older software keeps), and about half
with 16-bit autocast (`measurements/h100-80gb.csv`). All of this is a prior, not a measurement of speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ALIVE: Final = 0.3
"""Share of the activations that is alive at once in inference, of texts and where only the live ones are stated. Of a
transformer layer's 34 numbers for each element, which its backward pass keeps (arXiv 2205.05198), a forward pass holds
about ten: the feed-forward's hidden layer before and after its nonlinearity, and the residual stream.
"""
MIXED: Final = 0.75
"""Share of the activations that a backward pass of Ultralytics' models keeps: its trainer uses 16-bit autocast unless
it is switched off. An assumption on the large side; it was not measured.
"""
USUAL_KEPT: Final = {"px": 8.0, "tok": 10.0}
"""What a backward pass keeps relative to the live activations of inference, by the unit: of images about the median of
the counted networks below, of texts three layers' activations (3 / ALIVE).
"""


@dataclass(frozen=True)
class ModelFacts:
    """One model.

    `gflops`: 10^9 operations for one item of size `reference` (in `unit`: px, the side of a square image, or tok). For
    images the work grows with the square of the size; for tokens linearly, plus `4 x layers x width x tokens^2`.
    `kernels`: launches in one forward pass. `activation_mib`: activations of one item at `reference` (of the built-in
    models those of every layer of an image, of one layer of a text), of which the share `alive` is in memory at once in
    inference. `kept_mib`: what training takes for one item; 0: as is usual for the live ones. `weight_bytes`: per
    parameter as commonly served (4 for vision and encoders, 2 for decoders).
    """

    name: str
    family: str
    params_m: float
    gflops: float
    unit: str
    reference: int
    kernels: int
    activation_mib: float
    weight_bytes: int = 4
    layers: int = 0
    width: int = 0
    aliases: tuple[str, ...] = ()
    alive: float = 1.0
    kept_mib: float = 0.0

    def operations(self, size: int) -> float:
        """Return the operations for one item of `size`."""
        scale = size / self.reference
        if self.unit == "px":
            return self.gflops * 1e9 * scale * scale
        return self.gflops * 1e9 * scale + 4.0 * self.layers * self.width * float(size) * size

    def activations_mib(self, size: int) -> float:
        """Return the MiB of activations for one item of `size`."""
        scale = size / self.reference
        return self.activation_mib * (scale * scale if self.unit == "px" else scale)


def _vision(
    name: str,
    params_m: float,
    gmacs: float,
    kernels: int,
    memory: tuple[float, ...],
    *,
    size: int = 224,
    also: str = "",
) -> ModelFacts:
    """Return the specifications of a model of images.

    `memory`: MiB of the activations of every layer for one item, those that are in memory at once in inference, and
    those that a backward pass keeps in 32 bits, which are missing for Ultralytics' models.
    """
    act, live, *kept = memory
    family = "vit" if name.startswith(("vit", "swin", "deit", "beit", "segformer", "eva")) else "cnn"
    return ModelFacts(
        name, family, params_m, 2 * gmacs, "px", size, kernels, act,
        aliases=tuple(also.split()), alive=live / act, kept_mib=kept[0] if kept else MIXED * act,
    )  # fmt: skip


def _eva02(size: str, side: int) -> str:
    """Return timm's names of an EVA-02."""
    return f"eva02-{size}-patch14-{side} eva02-{size}-patch14-224"


def text_facts(
    name: str,
    family: str,
    params_m: float,
    layers: int,
    width: int,
    *,
    embed_m: float,
    weight_bytes: int = 4,
    also: str = "",
) -> ModelFacts:
    """Return the specifications of a model of texts; `embed_m` of the million parameters are never multiplied."""
    reference = 128 if family == "encoder" else 512
    gflops = 2 * (params_m - embed_m) * reference / 1e3
    activation = reference * width * 34 * weight_bytes / 2**20
    return ModelFacts(
        name, family, params_m, gflops, "tok", reference, layers * 18, activation, weight_bytes, layers, width,
        tuple(also.split()), ALIVE,
    )  # fmt: skip


TYPICAL: Final = (
    _vision("resnet18", 11.7, 1.81, 62, (25, 6.7, 21), also="resnet-18"),
    _vision("resnet34", 21.8, 3.66, 110, (38, 6.6, 31), also="resnet-34"),
    _vision("resnet50", 25.6, 4.09, 160, (90, 9.9, 82), also="resnet-50 resnet50-v1.5 resnet50-v1-5"),
    _vision("resnet101", 44.5, 7.80, 314, (130, 9.9, 121), also="resnet-101"),
    _vision("resnet152", 60.2, 11.51, 467, (180, 9.9, 169), also="resnet-152"),
    _vision("mobilenet-v2", 3.5, 0.30, 152, (75, 10.0, 75), also="mobilenetv2 mobilenet mobilenet-v2-1.0-224"),
    _vision("densenet121", 8.0, 2.83, 430, (140, 9.6, 124), also="densenet-121"),
    _vision("densenet169", 14.1, 3.36, 600, (160, 9.6, 150), also="densenet-169"),
    _vision("densenet201", 20.0, 4.29, 710, (200, 9.5, 194), also="densenet-201"),
    _vision("inception-v3", 27.2, 5.71, 290, (90, 15.8, 94), size=299, also="inceptionv3 inception"),
    _vision("vgg16", 138.4, 15.47, 40, (110, 49, 70), also="vgg-16"),
    _vision("vgg19", 143.7, 19.63, 46, (120, 49, 75), also="vgg-19"),
    _vision("efficientnet-b0", 5.3, 0.39, 240, (80, 10.0, 84), also="tf-efficientnet-b0"),
    _vision("efficientnet-b4", 19.3, 4.39, 470, (340, 43, 623), size=380, also="tf-efficientnet-b4"),
    _vision("convnext-tiny", 28.6, 4.46, 200, (90, 11.5, 104), also="convnext-t convnext convnext-tiny-224"),
    _vision(
        "vit-b-16",
        86.6,
        17.56,
        220,
        (60, 7.5, 114),
        also="vit-base vit-base-patch16-224 vit-base-patch16-224-in21k vit deit-b deit-base deit-base-patch16-224 "
        "deit-base-distilled-patch16-224",
    ),
    _vision(
        "vit-l-16",
        304.3,
        61.55,
        430,
        (110, 10.0, 300),
        also="vit-large vit-large-patch16-224 vit-large-patch16-224-in21k",
    ),
    _vision("swin-t", 28.3, 4.49, 260, (90, 13.8, 102), also="swin-tiny swin-tiny-patch4-window7-224"),
    text_facts("distilbert", "encoder", 66, 6, 768, embed_m=24, also="distilbert-base-uncased"),
    text_facts("bert-base", "encoder", 110, 12, 768, embed_m=24, also="bert bert-base-uncased bert-base-cased"),
    text_facts("bert-large", "encoder", 335, 24, 1024, embed_m=32, also="bert-large-uncased bert-large-cased"),
    text_facts("roberta-base", "encoder", 125, 12, 768, embed_m=39),
    text_facts("roberta-large", "encoder", 355, 24, 1024, embed_m=52),
    text_facts("gpt2", "decoder", 124, 12, 768, embed_m=0, also="gpt-2"),
    text_facts("gpt2-medium", "decoder", 355, 24, 1024, embed_m=0),
    text_facts("gpt2-large", "decoder", 774, 36, 1280, embed_m=0),
    text_facts("gpt2-xl", "decoder", 1558, 48, 1600, embed_m=0),
    text_facts("opt-1.3b", "decoder", 1316, 24, 2048, embed_m=0, weight_bytes=2),
    text_facts("qwen2.5-0.5b", "decoder", 494, 24, 896, embed_m=0, weight_bytes=2, also="qwen2.5-0.5b-instruct"),
    text_facts("qwen2.5-1.5b", "decoder", 1544, 28, 1536, embed_m=0, weight_bytes=2, also="qwen2.5-1.5b-instruct"),
    text_facts("qwen2.5-7b", "decoder", 7616, 28, 3584, embed_m=0, weight_bytes=2, also="qwen2.5-7b-instruct"),
    text_facts("llama-3.2-1b", "decoder", 1236, 16, 2048, embed_m=0, weight_bytes=2, also="llama-3.2-1b-instruct"),
    text_facts(
        "llama-3.1-8b", "decoder", 8030, 32, 4096, embed_m=0, weight_bytes=2, also="llama-3.1-8b-instruct llama-3-8b"
    ),
    text_facts(
        "mistral-7b", "decoder", 7248, 32, 4096, embed_m=0, weight_bytes=2, also="mistral-7b-v0.1 mistral-7b-instruct"
    ),
)
"""Those whose means stand for undescribed models of their families (`known`)."""
FURTHER: Final = (
    # kernels as those of the described model of the same kind, by its blocks; activations as theirs, in proportion to
    # the outputs of all matrix products and convolutions (timm's `infer_macts`)
    _vision("resnext50-32x4d", 25.0, 4.23, 160, (116, 10.7, 107), also="resnext50 resnext-50"),
    _vision("resnext101-32x8d", 88.8, 16.41, 314, (250, 18.4, 235), also="resnext101 resnext-101"),
    _vision("wide-resnet50-2", 68.9, 11.40, 160, (116, 10.1, 107), also="wide-resnet50 wide-resnet-50-2"),
    _vision("wide-resnet101-2", 126.9, 22.75, 314, (171, 10.1, 159), also="wide-resnet101 wide-resnet-101-2"),
    _vision("efficientnet-b1", 7.8, 0.69, 340, (128, 11.4, 136), size=240, also="tf-efficientnet-b1"),
    _vision("efficientnet-b2", 9.1, 1.09, 340, (191, 16.5, 203), size=288, also="tf-efficientnet-b2"),
    _vision("efficientnet-b3", 12.2, 1.83, 385, (281, 27, 298), size=300, also="tf-efficientnet-b3"),
    _vision("efficientnet-b5", 30.4, 10.27, 575, (1167, 62, 1249), size=456, also="tf-efficientnet-b5"),
    _vision("efficientnet-b6", 43.0, 19.07, 660, (1979, 111, 2116), size=528, also="tf-efficientnet-b6"),
    _vision("efficientnet-b7", 66.3, 37.75, 810, (3429, 143, 3674), size=600, also="tf-efficientnet-b7"),
    _vision(
        "efficientnet-v2-s", 21.5, 8.37, 520, (422, 18.6, 431), size=384, also="efficientnetv2-s tf-efficientnetv2-s"
    ),
    _vision(
        "efficientnet-v2-m", 54.1, 24.58, 750, (1060, 32, 1096), size=480, also="efficientnetv2-m tf-efficientnetv2-m"
    ),
    _vision(
        "efficientnet-v2-l", 118.5, 56.08, 1040, (1864, 42, 1924), size=480, also="efficientnetv2-l tf-efficientnetv2-l"
    ),
    _vision("convnext-small", 50.2, 8.68, 400, (144, 11.5, 166), also="convnext-s convnext-small-224"),
    _vision(
        "convnext-base",
        88.6,
        15.36,
        400,
        (193, 15.3, 222),
        also="convnext-b convnext-base-224 convnext-base-224-22k convnext-base-224-22k-1k",
    ),
    _vision(
        "convnext-large",
        197.8,
        34.36,
        400,
        (289, 23, 332),
        also="convnext-l convnext-large-224 convnext-large-224-22k convnext-large-224-22k-1k",
    ),
    _vision("regnet-y-800mf", 6.4, 0.83, 225, (42, 10.0, 44), also="regnety-008"),
    _vision("regnet-y-1.6gf", 11.2, 1.61, 430, (65, 7.9, 68), also="regnet-y-1-6gf regnety-016"),
    _vision("regnet-y-3.2gf", 19.4, 3.18, 340, (91, 11.1, 95), also="regnet-y-3-2gf regnety-032"),
    _vision("regnet-y-8gf", 39.4, 8.47, 275, (158, 31, 164), also="regnety-080"),
    _vision("regnet-y-16gf", 83.6, 15.91, 290, (185, 33, 192), also="regnety-160"),
    _vision("regnet-y-32gf", 145.0, 32.28, 320, (243, 32, 254), also="regnety-320"),
    _vision(
        "deit-s",
        22.1,
        4.61,
        220,
        (44, 3.4, 57),
        also="deit-small deit-small-patch16-224 vit-small vit-s-16 vit-small-patch16-224 "
        "deit-small-distilled-patch16-224",
    ),
    _vision("vit-b-32", 88.2, 4.41, 220, (19, 1.9, 29), also="vit-base-patch32-224"),
    _vision(
        "vit-h-14",
        632.0,
        167.30,
        575,
        (345, 16.3, 649),
        also="vit-huge vit-huge-patch14-224 vit-huge-patch14-224-in21k",
    ),
    _vision("eva02-tiny", 5.8, 4.68, 340, (52, 5.5, 113), size=336, also=_eva02("tiny", 336)),
    _vision("eva02-small", 22.1, 15.48, 340, (105, 11.0, 225), size=336, also=_eva02("small", 336)),
    _vision("eva02-base", 87.1, 107.11, 340, (372, 39, 817), size=448, also=_eva02("base", 448)),
    _vision("eva02-large", 305.1, 362.33, 670, (993, 52, 2162), size=448, also=_eva02("large", 448)),
    _vision("swin-s", 49.6, 8.74, 520, (145, 13.8, 162), also="swin-small swin-small-patch4-window7-224"),
    _vision(
        "swin-b",
        87.8,
        15.43,
        520,
        (193, 18.3, 216),
        also="swin-base swin-base-patch4-window7-224 swin-base-patch4-window7-224-in22k",
    ),
    _vision(
        "swin-l",
        196.5,
        34.53,
        520,
        (290, 29, 324),
        also="swin-large swin-large-patch4-window7-224 swin-large-patch4-window7-224-in22k",
    ),
    # counted and measured (see above)
    _vision("yolov5s", 9.2, 12.00, 230, (330, 31), size=640, also="yolov5su"),
    _vision("yolov5m", 25.1, 32.10, 290, (599, 47), size=640, also="yolov5mu"),
    _vision("yolov5l", 53.2, 67.49, 380, (943, 62), size=640, also="yolov5lu"),
    _vision("yolov5x", 97.3, 123.20, 460, (1365, 94), size=640, also="yolov5xu"),
    _vision("yolov8n", 3.2, 4.37, 210, (178, 18.7), size=640),
    _vision("yolov8s", 11.2, 14.30, 220, (332, 38), size=640),
    _vision("yolov8m", 25.9, 39.47, 290, (583, 66), size=640),
    _vision("yolov8l", 43.7, 82.57, 390, (891, 100), size=640),
    _vision("yolov8x", 68.2, 128.90, 400, (1113, 125), size=640),
    _vision("yolov9c", 25.6, 51.67, 510, (1049, 112), size=640),
    _vision("yolov9e", 58.2, 95.83, 1020, (2160, 459), size=640),
    _vision("yolov10n", 2.8, 4.31, 290, (269, 21), size=640),
    _vision("yolov10s", 8.1, 12.45, 310, (495, 37), size=640),
    _vision("yolov10m", 16.6, 32.03, 380, (843, 66), size=640),
    _vision("yolov10b", 20.6, 49.36, 410, (1118, 87), size=640),
    _vision("yolov10x", 31.8, 85.39, 530, (1814, 125), size=640),
    _vision("yolo11n", 2.6, 3.27, 250, (208, 25), size=640, also="yolov11n"),
    _vision("yolo11s", 9.5, 10.79, 270, (389, 50), size=640, also="yolov11s"),
    _vision("yolo11m", 20.1, 34.05, 340, (830, 100), size=640, also="yolov11m"),
    _vision("yolo11l", 25.4, 43.58, 540, (1053, 112), size=640, also="yolov11l"),
    _vision("yolo11x", 57.0, 97.64, 530, (1578, 169), size=640, also="yolov11x"),
    _vision("fasterrcnn-resnet50-fpn", 41.8, 134.38, 490, (1827, 328, 1345), size=800, also="faster-rcnn"),
    _vision("retinanet-resnet50-fpn", 34.1, 151.54, 660, (1837, 134, 1555), size=800, also="retinanet"),
    _vision("fcn-resnet50", 33.0, 142.73, 170, (1517, 132, 1040), size=520),
    _vision("fcn-resnet101", 51.9, 222.75, 340, (2779, 132, 1881), size=520),
    _vision("deeplabv3-resnet50", 39.6, 168.73, 190, (1562, 132, 1118), size=520),
    _vision("deeplabv3-resnet101", 58.6, 248.75, 360, (2825, 132, 1960), size=520, also="deeplabv3"),
    _vision("unet", 31.0, 192.69, 100, (1586, 416, 1434), size=512, also="u-net"),
    _vision("segformer-b0", 3.7, 7.77, 170, (294, 148, 364), size=512, also="segformer-b0-finetuned-ade-512-512"),
    _vision("segformer-b5", 84.6, 109.65, 870, (2223, 439, 2043), size=512),
    _vision("segformer-b5-finetuned-ade-640-640", 84.6, 171.33, 870, (3473, 686, 3193), size=640),
    _vision("alexnet", 61.1, 0.71, 20, (4, 2.2, 3.6)),
    _vision("squeezenet1-1", 1.2, 0.35, 70, (21, 5.2, 21)),
    _vision("googlenet", 6.6, 1.50, 170, (30, 6.7, 46)),
    _vision("shufflenet-v2-x1-0", 2.3, 0.14, 130, (21, 2.3, 19.4)),
    _vision("mobilenet-v3-small", 2.5, 0.06, 120, (16, 1.9, 15.4), also="mobilenetv3-small-100"),
    _vision("mobilenet-v3-large", 5.5, 0.22, 140, (48, 6.9, 42), also="mobilenetv3-large-100"),
    _vision("regnet-x-8gf", 39.6, 8.00, 270, (158, 12.0, 105)),
    _vision("swin-v2-t", 28.4, 5.94, 460, (146, 18.0, 171), size=256, also="swinv2-tiny-patch4-window8-256"),
    _vision("swin-v2-b", 87.9, 20.33, 940, (310, 24, 367), size=256, also="swinv2-base-patch4-window8-256"),
    # counted without a GPU: 0.7 of the operators that ran, of the outputs and of the live tensors what agrees with the
    # measured ones of the same makers
    _vision("yolov5n", 2.6, 3.86, 240, (175, 15.7), size=640, also="yolov5nu"),
    _vision("yolov8n-seg", 3.4, 6.00, 240, (224, 34), size=640),
    _vision("yolov8s-seg", 11.8, 20.04, 240, (400, 59), size=640),
    _vision("yolov8m-seg", 27.3, 52.27, 300, (684, 84), size=640),
    _vision("yolov8l-seg", 46.0, 105.20, 360, (1031, 108), size=640),
    _vision("yolov8x-seg", 71.8, 164.18, 360, (1281, 132), size=640),
    _vision("yolov8n-pose", 3.3, 4.59, 240, (187, 18.8), size=640),
    _vision("yolov8s-pose", 11.6, 15.09, 240, (340, 38), size=640),
    _vision("yolov8m-pose", 26.5, 40.51, 300, (595, 66), size=640),
    _vision("yolov8l-pose", 44.5, 84.27, 360, (916, 100), size=640),
    _vision("yolov8x-pose", 69.5, 131.60, 360, (1142, 125), size=640),
    _vision("yolov8n-obb", 3.2, 11.51, 240, (476, 48), size=1024),
    _vision("yolov8s-obb", 11.4, 37.87, 240, (868, 96), size=1024),
    _vision("yolov8m-obb", 26.5, 103.78, 300, (1529, 168), size=1024),
    _vision("yolov8l-obb", 44.5, 216.11, 360, (2352, 256), size=1024),
    _vision("yolov8x-obb", 69.6, 337.36, 360, (2929, 320), size=1024),
    _vision("yolov8n-cls", 2.7, 0.20, 80, (12, 2.3)),
    _vision("yolov8s-cls", 6.4, 0.76, 80, (24, 4.6)),
    _vision("yolov8m-cls", 17.1, 2.55, 120, (46, 8.0)),
    _vision("yolov8l-cls", 37.5, 6.05, 160, (74, 12.2)),
    _vision("yolov8x-cls", 57.4, 9.42, 160, (93, 15.3)),
    _vision("yolov9t", 2.1, 4.16, 740, (271, 22), size=640),
    _vision("yolov9s", 7.3, 13.61, 740, (511, 44), size=640),
    _vision("yolov9m", 20.2, 38.66, 500, (849, 81), size=640),
    _vision("yolov9c-seg", 27.9, 74.29, 550, (1212, 114), size=640),
    _vision("yolov9e-seg", 60.5, 118.45, 1030, (2702, 459), size=640),
    _vision("yolov10l", 25.9, 63.56, 540, (1280, 100), size=640),
    _vision("yolo11n-seg", 2.9, 4.90, 310, (252, 36), size=640, also="yolov11n-seg"),
    _vision("yolo11s-seg", 10.1, 16.54, 310, (454, 62), size=640, also="yolov11s-seg"),
    _vision("yolo11m-seg", 22.4, 56.67, 390, (930, 114), size=640, also="yolov11m-seg"),
    _vision("yolo11l-seg", 27.7, 66.20, 580, (1172, 114), size=640, also="yolov11l-seg"),
    _vision("yolo11x-seg", 62.1, 148.37, 580, (1743, 169), size=640, also="yolov11x-seg"),
    _vision("yolo11n-pose", 2.9, 3.82, 310, (228, 25), size=640, also="yolov11n-pose"),
    _vision("yolo11s-pose", 9.9, 11.67, 310, (404, 50), size=640, also="yolov11s-pose"),
    _vision("yolo11m-pose", 21.0, 35.92, 390, (826, 100), size=640, also="yolov11m-pose"),
    _vision("yolo11l-pose", 26.2, 45.45, 580, (1068, 112), size=640, also="yolov11l-pose"),
    _vision("yolo11x-pose", 58.9, 101.82, 580, (1589, 169), size=640, also="yolov11x-pose"),
    _vision("yolo11n-obb", 2.7, 8.81, 310, (557, 64), size=1024, also="yolov11n-obb"),
    _vision("yolo11s-obb", 9.7, 29.14, 310, (1022, 128), size=1024, also="yolov11s-obb"),
    _vision("yolo11m-obb", 21.0, 92.14, 390, (2111, 256), size=1024, also="yolov11m-obb"),
    _vision("yolo11l-obb", 26.2, 116.77, 580, (2746, 288), size=1024, also="yolov11l-obb"),
    _vision("yolo11x-obb", 58.9, 261.30, 580, (4097, 432), size=1024, also="yolov11x-obb"),
    _vision("yolo11n-cls", 2.8, 0.20, 120, (14, 3.1), also="yolov11n-cls"),
    _vision("yolo11s-cls", 6.7, 0.74, 120, (26, 6.1), also="yolov11s-cls"),
    _vision("yolo11m-cls", 11.6, 2.41, 150, (57, 12.2), also="yolov11m-cls"),
    _vision("yolo11l-cls", 14.1, 3.02, 260, (76, 13.8), also="yolov11l-cls"),
    _vision("yolo11x-cls", 29.6, 6.76, 260, (114, 21), also="yolov11x-cls"),
    _vision("yolo12n", 2.6, 3.74, 410, (310, 25), size=640, also="yolov12n"),
    _vision("yolo12s", 9.3, 11.67, 410, (586, 50), size=640, also="yolov12s"),
    _vision("yolo12m", 20.2, 35.36, 440, (1124, 100), size=640, also="yolov12m"),
    _vision("yolo12l", 26.4, 47.72, 730, (1700, 112), size=640, also="yolov12l"),
    _vision("yolo12x", 59.2, 104.43, 730, (2543, 169), size=640, also="yolov12x"),
    _vision("yolo26n", 2.6, 3.04, 390, (246, 25), size=640, also="yolov26n"),
    _vision("yolo26s", 10.0, 11.39, 390, (461, 50), size=640, also="yolov26s"),
    _vision("yolo26m", 21.9, 37.51, 420, (913, 100), size=640, also="yolov26m"),
    _vision("yolo26l", 26.3, 46.69, 590, (1149, 112), size=640, also="yolov26l"),
    _vision("yolo26x", 59.0, 104.45, 590, (1717, 169), size=640, also="yolov26x"),
    _vision("yolo26n-seg", 3.1, 5.22, 450, (307, 42), size=640, also="yolov26n-seg"),
    _vision("yolo26s-seg", 11.5, 18.65, 450, (558, 74), size=640, also="yolov26s-seg"),
    _vision("yolo26m-seg", 27.1, 66.03, 480, (1092, 135), size=640, also="yolov26m-seg"),
    _vision("yolo26l-seg", 31.5, 75.21, 650, (1329, 135), size=640, also="yolov26l-seg"),
    _vision("yolo26x-seg", 70.7, 168.44, 650, (1979, 196), size=640, also="yolov26x-seg"),
    _vision("rtdetr-l", 33.0, 54.77, 650, (1306, 78), size=640, also="rt-detr-l"),
    _vision("rtdetr-x", 67.5, 116.92, 790, (1889, 100), size=640, also="rt-detr-x"),
    # counted without a GPU (torchvision 0.29, timm 1.0): the live tensors, which agree with the measured ones but for
    # those of VGG, RegNet and Inception, where convolutions take more; operators and outputs as those of the measured
    # models of the same kind
    _vision("densenet161", 28.7, 7.73, 570, (260, 14.4, 232), also="densenet-161"),
    _vision("vgg11", 132.9, 7.61, 30, (73, 43, 47), also="vgg-11"),
    _vision("vgg13", 133.0, 11.31, 34, (102, 49, 65), also="vgg-13"),
    _vision("vgg11-bn", 132.9, 7.61, 38, (82, 49, 75)),
    _vision("vgg13-bn", 133.1, 11.31, 44, (122, 49, 112)),
    _vision("vgg16-bn", 138.4, 15.47, 54, (133, 49, 122)),
    _vision("vgg19-bn", 143.7, 19.63, 64, (144, 49, 132)),
    _vision("mnasnet0-5", 2.2, 0.10, 143, (27, 2.7, 24), also="mnasnet-050"),
    _vision("mnasnet0-75", 3.2, 0.22, 143, (41, 5.4, 37), also="mnasnet-075"),
    _vision("mnasnet1-0", 4.4, 0.31, 143, (47, 5.4, 42), also="mnasnet mnasnet-100"),
    _vision("mnasnet1-3", 6.3, 0.53, 143, (63, 8.0, 57), also="mnasnet-140"),
    _vision("regnet-x-400mf", 5.5, 0.41, 220, (29, 6.3, 24), also="regnetx-004"),
    _vision("regnet-x-800mf", 7.3, 0.80, 165, (48, 10.5, 38), also="regnetx-008"),
    _vision("regnet-x-1.6gf", 9.2, 1.60, 183, (74, 11.6, 59), also="regnet-x-1-6gf regnetx-016"),
    _vision("regnet-x-3.2gf", 15.3, 3.18, 250, (107, 14.9, 85), also="regnet-x-3-2gf regnetx-032"),
    _vision("regnet-x-16gf", 54.3, 15.94, 221, (241, 36, 189), also="regnetx-160"),
    _vision("regnet-x-32gf", 107.8, 31.74, 231, (344, 47, 270), also="regnetx-320"),
    _vision("regnet-y-400mf", 4.3, 0.40, 255, (39, 8.4, 32), also="regnety-004"),
    _vision("resnext101-64x4d", 83.5, 15.46, 314, (264, 18.4, 235)),
    _vision("shufflenet-v2-x0-5", 1.4, 0.04, 130, (12, 2.3, 10.5)),
    _vision("shufflenet-v2-x1-5", 3.5, 0.30, 130, (30, 2.7, 27)),
    _vision("shufflenet-v2-x2-0", 7.4, 0.58, 130, (41, 3.6, 37)),
    _vision("squeezenet1-0", 1.2, 0.82, 70, (36, 7.6, 35), also="squeezenet"),
    _vision("swin-v2-s", 49.7, 11.55, 930, (234, 18.0, 276), size=256, also="swinv2-small-patch4-window8-256"),
    _vision("vit-l-32", 306.5, 15.38, 430, (24, 2.5, 76), also="vit-large-patch32-224"),
    _vision(
        "vit-tiny", 5.7, 1.25, 220, (22, 1.9, 28), also="vit-ti-16 vit-tiny-patch16-224 deit-tiny deit-tiny-patch16-224"
    ),
    _vision("deit3-base", 86.6, 17.56, 220, (60, 7.6, 128), also="deit3-b deit3-base-patch16-224"),
    _vision("beit-base", 86.5, 17.56, 240, (61, 7.5, 135), also="beit beit-b beit-base-patch16-224"),
    _vision("maxvit-t", 30.9, 5.56, 450, (418, 31, 293), also="maxvit maxvit-tiny maxvit-tiny-tf-224"),
    _vision("deeplabv3-mobilenet-v3-large", 11.0, 10.44, 145, (316, 37, 331), size=520),
    _vision("lraspp-mobilenet-v3-large", 3.2, 2.09, 135, (293, 37, 314), size=520, also="lraspp"),
    _vision("mixer-b-16", 59.9, 12.60, 130, (163, 6.9, 113), also="mlp-mixer mixer-b16-224"),
    _vision("mobilenet-v1", 4.2, 0.57, 79, (42, 9.2, 58), also="mobilenetv1-100 mobilenet-v1-1.0-224"),
    _vision("mobilenetv4-conv-medium", 9.7, 0.83, 200, (50, 7.3, 45), also="mobilenet-v4-medium"),
    _vision("mobilevit-s", 5.6, 2.00, 190, (184, 19.0, 171), size=256, also="mobilevit mobilevit-small"),
    _vision("ghostnet", 5.2, 0.14, 200, (43, 6.1, 38), also="ghostnet-100"),
    _vision("xception", 22.9, 8.36, 159, (271, 37, 234), size=299, also="legacy-xception"),
    _vision("inception-v4", 42.7, 12.25, 467, (184, 15.8, 164), size=299),
    _vision("inception-resnet-v2", 55.8, 13.16, 780, (337, 15.8, 176), size=299),
    _vision("nasnet-a-large", 88.8, 23.78, 1200, (1307, 97, 983), size=331, also="nasnet nasnet-large"),
    _vision("senet154", 115.1, 20.69, 780, (440, 13.8, 345), also="senet legacy-senet154"),
    _vision("seresnet50", 28.1, 4.09, 257, (119, 10.0, 103), also="se-resnet-50"),
    _vision("seresnext50-32x4d", 27.6, 4.23, 257, (147, 10.7, 128), also="seresnext50 se-resnext-50"),
    _vision("resnest50", 27.5, 5.37, 313, (157, 12.3, 116), also="resnest resnest50d"),
    _vision("res2net50-26w-4s", 25.7, 4.26, 298, (122, 12.4, 105), also="res2net50"),
    _vision("resnetv2-50", 25.5, 4.09, 160, (110, 13.0, 74)),
    _vision("dpn92", 37.7, 6.50, 333, (246, 14.2, 153), also="dpn-92"),
    _vision("dla34", 15.7, 3.06, 126, (51, 9.2, 45)),
    _vision("hrnet-w18", 21.3, 4.28, 1087, (156, 10.0, 121), also="hrnet"),
    _vision("darknet53", 41.6, 9.29, 172, (127, 22, 116), size=256, also="darknet"),
    _vision("cspdarknet53", 27.6, 6.53, 220, (168, 36, 153), size=256),
    _vision("coatnet-0", 27.4, 4.41, 200, (199, 13.4, 170), also="coatnet coatnet-0-rw-224"),
    _vision("convnext-xlarge", 350.2, 60.92, 400, (417, 34, 443), also="convnext-xl convnext-xlarge-224-22k"),
    _vision("poolformer-s24", 21.4, 3.39, 190, (148, 9.2, 112)),
    _vision("pvt-v2-b2", 25.4, 4.03, 230, (278, 16.5, 154)),
    # its backbone at this size has most of its activations
    _vision("detr-resnet50", 41.3, 64.5, 470, (1400, 238, 598), size=800, also="detr detr-resnet-50 detr-r50"),
)
BUILT_IN: Final = (*TYPICAL, *FURTHER)
