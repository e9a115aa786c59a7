// From a file to the elements of a tensor: an image as pixels, anything else as its bytes.
import { isFloat } from "./values";
import type { Element, InputConfig, TensorInfo } from "./types";

/** Where a tensor's image has its rows, columns and colours. A size of -1 is the image's own. */
export interface ImageLayout {
  isChannelsFirst: boolean;
  height: number;
  width: number;
  channels: number;
  /** Whether a dimension of the batch stands before the image. */
  hasBatch: boolean;
}

export const SCALINGS = {
  none: "0 to 255",
  unit: "0 to 1",
  inception: "-1 to 1",
  imagenet: "ImageNet's mean and deviation",
} as const;
export type Scaling = keyof typeof SCALINGS;

const CHANNELS = [1, 3, 4];
const MEAN = [0.485, 0.456, 0.406, 0];
const DEVIATION = [0.229, 0.224, 0.225, 1];

/** Returns how a tensor holds an image; null where its shape is none of an image. */
export function findLayout({ datatype, shape }: TensorInfo, format?: InputConfig["format"]): ImageLayout | null {
  if (datatype === "BYTES" || datatype === "BOOL" || shape.length < 3 || shape.length > 4) return null;
  const hasBatch = shape.length === 4;
  const [first = 0, second = 0, third = 0] = shape.slice(-3);
  if (hasBatch && ![1, -1].includes(shape[0] ?? 0)) return null;
  const isFirst = CHANNELS.includes(first) && isSize(second) && isSize(third);
  const isLast = CHANNELS.includes(third) && isSize(first) && isSize(second);
  if (isFirst && format !== "FORMAT_NHWC") {
    return { isChannelsFirst: true, channels: first, height: second, width: third, hasBatch };
  }
  return isLast ? { isChannelsFirst: false, channels: third, height: first, width: second, hasBatch } : null;
}

/** Sides below 8 pixels are rather those of a matrix. */
function isSize(side: number): boolean {
  return side === -1 || side >= 8;
}

export interface ImageTensor {
  elements: Element[];
  shape: number[];
}

/** Reads an image, brings it to the size that the shape says, and returns its pixels as elements. */
export async function readImage(file: Blob, layout: ImageLayout, scaling: Scaling, datatype: TensorInfo["datatype"]): Promise<ImageTensor> {
  const image = await createImageBitmap(file);
  const width = layout.width < 0 ? image.width : layout.width;
  const height = layout.height < 0 ? image.height : layout.height;
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  if (!context) throw new Error("The browser cannot draw images.");
  context.drawImage(image, 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height);
  const scale = isFloat(datatype) ? scaling : "none";
  const sizes = layout.isChannelsFirst ? [layout.channels, height, width] : [height, width, layout.channels];
  return { elements: arrange(data, layout, width * height, scale), shape: layout.hasBatch ? [1, ...sizes] : sizes };
}

/** Puts the colours of RGBA pixels in the order of the layout. */
export function arrange(rgba: ArrayLike<number>, layout: ImageLayout, numPixels: number, scaling: Scaling): number[] {
  const { channels, isChannelsFirst } = layout;
  return Array.from({ length: numPixels * channels }, (_, n) => {
    const channel = isChannelsFirst ? Math.floor(n / numPixels) : n % channels;
    const pixel = isChannelsFirst ? n % numPixels : Math.floor(n / channels);
    return scaleColor(channels === 1 ? luma(rgba, pixel) : (rgba[pixel * 4 + channel] ?? 0), channel, scaling);
  });
}

function luma(rgba: ArrayLike<number>, pixel: number): number {
  const [red = 0, green = 0, blue = 0] = [0, 1, 2].map((each) => rgba[pixel * 4 + each]);
  return Math.round(0.299 * red + 0.587 * green + 0.114 * blue);
}

function scaleColor(color: number, channel: number, scaling: Scaling): number {
  if (scaling === "unit") return color / 255;
  if (scaling === "inception") return color / 127.5 - 1;
  if (scaling === "imagenet") return (color / 255 - (MEAN[channel] ?? 0)) / (DEVIATION[channel] ?? 1);
  return color;
}

/** Returns the size of an image that a tensor seems to be, for a preview; null where it is none. */
export function findPicture(info: TensorInfo): ImageLayout | null {
  const layout = findLayout(info);
  return layout && layout.width > 0 && layout.height > 0 ? layout : null;
}

/** Returns the RGBA pixels of a tensor's elements, from the least of its numbers (black) to the greatest (white). */
export function toPixels(elements: ArrayLike<number>, layout: ImageLayout): Uint8ClampedArray<ArrayBuffer> {
  const { channels, isChannelsFirst, width, height } = layout;
  const numPixels = width * height;
  let [low, high] = [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY];
  for (let n = 0; n < numPixels * channels; n++) {
    low = Math.min(low, elements[n] ?? 0);
    high = Math.max(high, elements[n] ?? 0);
  }
  if (low >= 0 && high <= 255 && high > 1) [low, high] = [0, 255];
  const pixels = new Uint8ClampedArray(numPixels * 4).fill(255);
  for (let pixel = 0; pixel < numPixels; pixel++) {
    for (let color = 0; color < (channels === 4 ? 4 : 3); color++) {
      const channel = channels === 1 ? 0 : color;
      const at = isChannelsFirst ? channel * numPixels + pixel : pixel * channels + channel;
      pixels[pixel * 4 + color] = (((elements[at] ?? 0) - low) / (high - low || 1)) * 255;
    }
  }
  return pixels;
}
