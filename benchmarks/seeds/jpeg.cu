/* JPEG to a JPEG of a quarter of its width, by multiprocessors alone: Huffman codes, too, a thread for each interval between
 * two restart markers, as codecs for GPUs do it. jpeg.ptx is made of this file by packaging/write_kernels.py. Baseline,
 * three components, 4:2:0: six blocks of 8x8 in each unit of 16x16. `numbers` are the zigzag order, then the divisors of
 * brightness and of colour, in that order.
 */

#define THIS (blockIdx.x * blockDim.x + threadIdx.x)
#define UNIT 2592 /* bytes that the codes of a unit take at most: 6 * 64 * 27 bits, each byte with a zero behind it */

extern "C" {

/* Restart markers that begin in each part of the data. */
__global__ void count(const unsigned char *data, int from, int size, int part, int parts, int *counts)
{
    int i = THIS, found = 0;
    if (i >= parts)
        return;
    for (int at = from + i * part; at < from + (i + 1) * part && at < size - 1; at++)
        found += data[at] == 0xff && (data[at + 1] & 0xf8) == 0xd0;
    counts[i] = found;
}

/* Where each interval begins. */
__global__ void mark(const unsigned char *data, int from, int size, int part, int parts, const int *counts, int *begins)
{
    int i = THIS, next = 1;
    if (i >= parts)
        return;
    for (int before = 0; before < i; before++)
        next += counts[before];
    if (i == 0)
        begins[0] = from;
    for (int at = from + i * part; at < from + (i + 1) * part && at < size - 1; at++)
        if (data[at] == 0xff && (data[at + 1] & 0xf8) == 0xd0)
            begins[next++] = at + 2;
}

/* Coefficients, multiplied. `codes`: for each 16 bits that may come the length of the code and its value, of four kinds. */
__global__ void entropy(const unsigned char *data, const int *begins, int intervals, int each, int units,
                        const unsigned short *codes, const int *numbers, short *coefficients)
{
    int i = THIS;
    if (i >= intervals)
        return;
    const unsigned char *next = data + begins[i];
    unsigned long long bits = 0;
    int have = 0, last[3] = {0, 0, 0};
    for (int unit = i * each; unit < (i + 1) * each && unit < units; unit++)
        for (int block = 0; block < 6; block++) {
            int component = block < 4 ? 0 : block - 3, colour = component > 0;
            const int *divisors = numbers + 64 + 64 * colour;
            short *to = coefficients + (unit * 6 + block) * 64;
            for (int k = 0; k < 64; k++)
                to[k] = 0;
            for (int k = 0; k < 64;) {
                while (have <= 48) {
                    unsigned byte = *next;
                    if (byte != 0xff)
                        next++;
                    else if (next[1] == 0)
                        next += 2;
                    else
                        byte = 0; /* a marker: the interval is over */
                    bits = bits << 8 | byte;
                    have += 8;
                }
                unsigned code = codes[(2 * colour + (k > 0)) << 16 | ((bits >> (have - 16)) & 0xffff)];
                have -= code >> 8;
                int skip = k ? (code >> 4) & 15 : 0, size = code & 15, value = 0;
                if (size) {
                    value = (bits >> (have - size)) & ((1 << size) - 1);
                    have -= size;
                    if (value < 1 << (size - 1))
                        value -= (1 << size) - 1;
                }
                if (k == 0) {
                    last[component] += value;
                    to[0] = last[component] * divisors[0];
                    k = 1;
                } else if (size) {
                    k += skip;
                    if (k < 64)
                        to[numbers[k]] = value * divisors[k];
                    k++;
                } else
                    k = skip == 15 ? k + 16 : 64;
            }
        }
}

/* Pixels of each block, in three planes one after the other. `waves`: cosines, eight for each place. */
__global__ void inverse(const short *coefficients, int wide, int units, const float *waves, unsigned char *planes)
{
    int i = THIS;
    if (i >= units * 6)
        return;
    int unit = i / 6, block = i % 6, x = unit % wide, y = unit / wide;
    float half[64];
    const short *from = coefficients + i * 64;
    for (int row = 0; row < 8; row++)
        for (int place = 0; place < 8; place++) {
            float sum = 0;
            for (int k = 0; k < 8; k++)
                sum += from[row * 8 + k] * waves[place * 8 + k];
            half[row * 8 + place] = sum;
        }
    int stride = block < 4 ? 16 * wide : 8 * wide;
    unsigned char *to = block < 4 ? planes + (y * 16 + block / 2 * 8) * stride + x * 16 + block % 2 * 8
                                  : planes + units * 64 * block + y * 8 * stride + x * 8;
    for (int column = 0; column < 8; column++)
        for (int place = 0; place < 8; place++) {
            float sum = 128.5f;
            for (int k = 0; k < 8; k++)
                sum += half[k * 8 + column] * waves[place * 8 + k];
            to[place * stride + column] = sum < 0 ? 0 : sum > 255 ? 255 : (unsigned char)sum;
        }
}

/* The mean of 4x4 pixels; of all planes. */
__global__ void shrink(const unsigned char *planes, int wide, int units, int small_wide, int small_units, unsigned char *small)
{
    int i = THIS;
    if (i >= small_units * 384)
        return;
    int plane = i < small_units * 256 ? 0 : 1 + (i - small_units * 256) / (small_units * 64);
    int first = plane ? small_units * (192 + 64 * plane) : 0, to_wide = small_wide * (plane ? 8 : 16);
    int x = (i - first) % to_wide, y = (i - first) / to_wide, stride = wide * (plane ? 8 : 16), sum = 8;
    const unsigned char *from = planes + (plane ? units * (192 + 64 * plane) : 0) + y * 4 * stride + x * 4;
    for (int row = 0; row < 4; row++)
        for (int column = 0; column < 4; column++)
            sum += from[row * stride + column];
    small[i] = sum / 16;
}

/* Coefficients of each block, divided, in zigzag order. */
__global__ void forward(const unsigned char *planes, int wide, int units, const float *waves, const int *numbers,
                        short *coefficients)
{
    int i = THIS;
    if (i >= units * 6)
        return;
    int unit = i / 6, block = i % 6, x = unit % wide, y = unit / wide, stride = block < 4 ? 16 * wide : 8 * wide;
    const unsigned char *from = block < 4 ? planes + (y * 16 + block / 2 * 8) * stride + x * 16 + block % 2 * 8
                                          : planes + units * 64 * block + y * 8 * stride + x * 8;
    float half[64];
    for (int row = 0; row < 8; row++)
        for (int k = 0; k < 8; k++) {
            float sum = 0;
            for (int place = 0; place < 8; place++)
                sum += (from[row * stride + place] - 128) * waves[place * 8 + k];
            half[row * 8 + k] = sum;
        }
    for (int k = 0; k < 64; k++) {
        float sum = 0;
        for (int place = 0; place < 8; place++)
            sum += half[place * 8 + numbers[k] % 8] * waves[place * 8 + numbers[k] / 8];
        sum /= numbers[64 + (block < 4 ? 0 : 64) + k];
        coefficients[i * 64 + k] = (short)(sum < 0 ? sum - 0.5f : sum + 0.5f);
    }
}

/* The codes of each interval, each in a place of its own, and how many bytes. `words`: a code and its length, of four kinds. */
__global__ void code(const short *coefficients, int intervals, int each, int units, const int *words, unsigned char *out,
                     int *sizes)
{
    int i = THIS;
    if (i >= intervals)
        return;
    unsigned char *begin = out + i * each * UNIT, *to = begin;
    unsigned long long bits = 0;
    int have = 0, last[3] = {0, 0, 0};
    for (int unit = i * each; unit < (i + 1) * each && unit < units; unit++)
        for (int block = 0; block < 6; block++) {
            int component = block < 4 ? 0 : block - 3, run = 0;
            const short *from = coefficients + (unit * 6 + block) * 64;
            const int *mine = words + (component > 0) * 512;
            int end = 1; /* from there on all are 0 */
            for (int k = 1; k < 64; k++)
                end = from[k] ? k + 1 : end;
            for (int k = 0; k <= end && k < 64; k++) {
                int value = from[k], symbol, size = 0;
                if (k == 0) {
                    value -= last[component];
                    last[component] += value;
                } else if (k < end && value == 0 && ++run < 16)
                    continue;
                for (int rest = value < 0 ? -value : value; rest; rest >>= 1)
                    size++;
                if (k == 0)
                    symbol = size;
                else if (k == end)
                    symbol = 0;
                else if (value == 0)
                    symbol = 0xf0, run = 0; /* sixteen that are 0 */
                else
                    symbol = run << 4 | size, run = 0;
                int word = mine[(k > 0) * 256 + symbol];
                bits = bits << (word & 31) | (unsigned)(word >> 5);
                bits = bits << size | ((value < 0 ? value - 1 : value) & ((1 << size) - 1));
                have += (word & 31) + size;
                for (; have >= 8; have -= 8) {
                    *to++ = bits >> (have - 8);
                    if (to[-1] == 0xff)
                        *to++ = 0;
                }
            }
        }
    if (have) {
        *to++ = bits << (8 - have) | (0xff >> have);
        if (to[-1] == 0xff)
            *to++ = 0;
    }
    if (i < intervals - 1) {
        *to++ = 0xff;
        *to++ = 0xd0 | (i & 7);
    }
    sizes[i] = to - begin;
}

/* All intervals one after the other; behind their sizes the sum. */
__global__ void gather(const unsigned char *parts, int intervals, int each, int *sizes, unsigned char *out)
{
    int i = THIS, at = 0;
    if (i >= intervals)
        return;
    for (int before = 0; before < i; before++)
        at += sizes[before];
    for (int k = 0; k < sizes[i]; k++)
        out[at + k] = parts[i * each * UNIT + k];
    if (i == intervals - 1)
        sizes[intervals] = at + sizes[i];
}

}
