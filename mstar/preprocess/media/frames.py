"""Films: an animation in one file, or pictures that follow each other."""

from collections.abc import Sequence

from mstar.errors import RequestError
from mstar.preprocess.media.images import decode_frames, decode_image
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.types import Pixels, VideoMedia

DEFAULT_FPS = 2.0
"""Frames a second of pictures that do not say so."""


def decode_video(contents: Sequence[bytes], fps: float | None, limits: MediaLimits) -> VideoMedia:
    """Return a film.

    Args:
        contents: One animation (GIF, WebP, PNG), or its frames as a picture each.
        fps: Frames a second; ``None``: the animation's own, two for pictures.
        limits: Bounds of frames and pixels.

    Raises:
        RequestError: If a picture cannot be decoded, they differ in size, or there are too many.
            Containers of films (MP4, WebM) are not decoded here.
    """
    if len(contents) == 1:
        _refuse_container(contents[0])
        frames, own_fps = decode_frames(contents[0], limits)
        return VideoMedia(frames, fps or own_fps)
    if len(contents) > limits.video_frames:
        raise RequestError(
            f"the film has {len(contents)} frames; at most {limits.video_frames} are taken: leave "
            "some out",
            code="media_too_large",
        )
    decoded: list[Pixels] = []
    num_pixels = 0
    for number, content in enumerate(contents):
        frame = decode_image(content, limits)
        num_pixels += frame.shape[0] * frame.shape[1]
        if num_pixels > limits.request_pixels:
            raise RequestError(
                f"the film's first {number + 1} frames have {num_pixels} pixels; at most "
                f"{limits.request_pixels} are taken: scale them down or leave some out",
                code="media_too_large",
            )
        if decoded and frame.shape != decoded[0].shape:
            sizes = [f"{one.shape[1]} x {one.shape[0]}" for one in (frame, decoded[0])]
            raise RequestError(
                f"the film's frame {number} is {sizes[0]}, the first {sizes[1]}; all must have "
                "one size",
                code="invalid_video",
            )
        decoded.append(frame)
    return VideoMedia(tuple(decoded), fps or DEFAULT_FPS)


def _refuse_container(content: bytes) -> None:
    is_mp4 = content[4:8] == b"ftyp"
    if is_mp4 or (content[:4] in (b"\x1aE\xdf\xa3", b"RIFF") and content[8:12] != b"WEBP"):
        raise RequestError(
            "the film is a container (MP4, WebM, AVI), which is not decoded here; send an animated "
            "WebP or GIF, or frames: data:video/jpeg;base64,<frame>,<frame>,…",
            code="invalid_video",
        )
