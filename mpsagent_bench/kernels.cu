/* The kernels of the benchmark. kernels.ptx is made of this file by packaging/write_kernels.py, and committed, so that a
 * node needs no compiler. Plain loops on purpose: no shared memory and no barrier, so that a test can run the same text
 * on the processor and compare, and so that every driver since 2020 takes it.
 */

#define THIS (blockIdx.x * blockDim.x + threadIdx.x)

extern "C" {

/* A chain of dependent multiplications: one block of it keeps one multiprocessor busy, and no other. */
__global__ void chain(float *values, int length)
{
    float value = values[THIS];
    for (int i = 0; i < length; i++)
        value = value * 0.999f + 0.5f;
    values[THIS] = value;
}

/* A layer that is hardly more than its launch. */
__global__ void scale(float *values, int count, float factor, float offset)
{
    int i = THIS;
    if (i < count)
        values[i] = values[i] * factor + offset;
}

/* Three bytes a pixel, bilinear. */
__global__ void resize(const unsigned char *from, int width, int height, unsigned char *to, int wide, int high)
{
    int i = THIS;
    if (i >= wide * high)
        return;
    float x = ((i % wide) + 0.5f) * width / wide - 0.5f, y = ((i / wide) + 0.5f) * height / high - 0.5f;
    x = x < 0 ? 0 : x;
    y = y < 0 ? 0 : y;
    int left = (int)x, above = (int)y;
    int right = left + 1 < width ? left + 1 : left, below = above + 1 < height ? above + 1 : above;
    float dx = x - left, dy = y - above;
    for (int c = 0; c < 3; c++) {
        float top = from[(above * width + left) * 3 + c] * (1 - dx) + from[(above * width + right) * 3 + c] * dx;
        float low = from[(below * width + left) * 3 + c] * (1 - dx) + from[(below * width + right) * 3 + c] * dx;
        to[i * 3 + c] = (unsigned char)(top * (1 - dy) + low * dy + 0.5f);
    }
}

/* Gravity of all on all: x, y, z and mass of each body; x, y, z of its speed in a row of four. */
__global__ void attract(const float *bodies, float *speeds, int count, float step)
{
    int i = THIS;
    if (i >= count)
        return;
    float x = bodies[4 * i], y = bodies[4 * i + 1], z = bodies[4 * i + 2], ax = 0, ay = 0, az = 0;
    for (int j = 0; j < count; j++) {
        float dx = bodies[4 * j] - x, dy = bodies[4 * j + 1] - y, dz = bodies[4 * j + 2] - z;
        float inverse = 1.0f / sqrtf(dx * dx + dy * dy + dz * dz + 0.01f);
        float pull = bodies[4 * j + 3] * inverse * inverse * inverse;
        ax += dx * pull;
        ay += dy * pull;
        az += dz * pull;
    }
    speeds[4 * i] += ax * step;
    speeds[4 * i + 1] += ay * step;
    speeds[4 * i + 2] += az * step;
}

__global__ void move(float *bodies, const float *speeds, int count, float step)
{
    int i = THIS;
    if (i < count)
        for (int c = 0; c < 3; c++)
            bodies[4 * i + c] += speeds[4 * i + c] * step;
}

/* out (rows x columns) = a (rows x inner) * b (inner x columns); `a_by`, `b_by`: 1 when that one lies transposed. */
__global__ void multiply(const float *a, const float *b, float *out, int rows, int inner, int columns, int a_by, int b_by)
{
    int i = THIS;
    if (i >= rows * columns)
        return;
    int row = i / columns, column = i % columns;
    float sum = 0;
    for (int k = 0; k < inner; k++)
        sum += (a_by ? a[k * rows + row] : a[row * inner + k]) * (b_by ? b[column * inner + k] : b[k * columns + column]);
    out[i] = sum;
}

__global__ void rectify(float *values, int count)
{
    int i = THIS;
    if (i < count && values[i] < 0)
        values[i] = 0;
}

/* The gradient goes on only where the unit was active. */
__global__ void rectify_back(float *gradient, const float *values, int count)
{
    int i = THIS;
    if (i < count && values[i] <= 0)
        gradient[i] = 0;
}

/* A row for each example: its loss (cross entropy of the softmax), and the gradient for the units of that row. */
__global__ void losses(const float *units, const int *labels, float *gradient, float *loss, int rows, int columns)
{
    int row = THIS;
    if (row >= rows)
        return;
    const float *own = units + row * columns;
    float most = own[0], sum = 0;
    for (int c = 1; c < columns; c++)
        most = own[c] > most ? own[c] : most;
    for (int c = 0; c < columns; c++)
        sum += expf(own[c] - most);
    for (int c = 0; c < columns; c++)
        gradient[row * columns + c] = (expf(own[c] - most) / sum - (c == labels[row])) / rows;
    loss[row] = logf(sum) + most - own[labels[row]];
}

__global__ void descend(float *weights, const float *gradient, int count, float rate)
{
    int i = THIS;
    if (i < count)
        weights[i] -= rate * gradient[i];
}

}
