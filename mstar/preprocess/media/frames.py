"""Films: an animation in one file, or pictures that follow each other."""

from collections.abc import Sequence

from mstar.errors import RequestError
from mstar.preprocess.media.containers import decode_film
from mstar.preprocess.media.headers import container_of
from mstar.preprocess.media.images import decode_frames, decode_image
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.types import Pixels, VideoMedia

DEFAULT_FPS = 2.0
"""Frames a second of pictures that do not say so, and that are taken of a film."""


def decode_video(contents: Sequence[bytes], fps: float | None, limits: MediaLimits) -> VideoMedia:
    """Return a film.

    Args:
        contents: One animation (GIF, WebP, PNG), one film (MP4, WebM), or frames as a picture each.
        fps: Frames a second; ``None``: the animation's own, two for pictures. Of a film so many
            are taken.
        limits: Bounds of frames and pixels.

    Raises:
        RequestError: If a picture cannot be decoded, they differ in size, or there are too many.
    """
    if len(contents) == 1:
        container = container_of(contents[0])
        if container is not None:
            return decode_film(contents[0], container, fps or DEFAULT_FPS, limits)
        try:
            frames, own_fps = decode_frames(contents[0], limits)
        except RequestError as error:
            if error.code != "invalid_image":
                raise
            raise RequestError(
                f"the film is no MP4, WebM or animation that can be read: {error.message}",
                code="invalid_video",
            ) from error
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
