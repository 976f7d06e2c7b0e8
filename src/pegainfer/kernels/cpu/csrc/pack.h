// Weights from a file's layout into tiles, and rows back out.
#pragma once

#include "formats.h"

namespace pega {

// Sizes and offsets of a packed weight; data stays null. False where the format is unknown or the shape does
// not fit it.
bool describe(Packed* w, int32_t format, int64_t count, int64_t n, int64_t k);

// Fills w->data (w->count · w->tiles · w->tile_bytes) from rows in a file's layout, on `threads` threads.
// rows: where each of the w->count · w->n rows lies.
void pack(const Packed& w, const uint8_t* const* rows, int threads);

// Row `row` of all count · n as k float32 values, with GGUF's roundings.
void unpack_row(const Packed& w, int64_t row, float* out);

}  // namespace pega
