#include <algorithm>
#include <span>

#include "src/client/c_boundary.h"

// rk_describe_tensors.
namespace rekindle::client {

namespace {

// DLTensor of DLPack 1.3 (dmlc/dlpack, include/dlpack/dlpack.h): the same in every version 1.
struct DlTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t dimensions;
  std::uint8_t dtype_code;
  std::uint8_t dtype_bits;
  std::uint16_t dtype_lanes;
  const std::int64_t* shape;
  // In elements. Null: row-major.
  const std::int64_t* strides;
  std::uint64_t byte_offset;
};
static_assert(sizeof(DlTensor) == 48 && offsetof(DlTensor, shape) == 24);
static_assert(sizeof(rk_tensor_layout) == 40);

// The output arrays for the dimensions of all tensors.
struct Dimensions {
  std::span<std::int64_t> shapes;
  std::span<std::int64_t> strides;
  std::size_t used = 0;

  bool have_room_for(std::size_t count) const { return count <= shapes.size() - used; }

  // Returns whether the tensor is row-major without gaps. As in torch, the stride of a dimension of
  // size 1 does not matter, and no stride of a tensor without elements does.
  bool add(const DlTensor& tensor) {
    std::int64_t dense = 1;
    bool is_contiguous = true;
    bool is_empty = false;
    for (std::int32_t i = tensor.dimensions - 1; i >= 0; --i) {
      const std::int64_t size = tensor.shape[i];
      const std::int64_t stride = tensor.strides == nullptr ? dense : tensor.strides[i];
      const std::size_t at = used + static_cast<std::size_t>(i);
      shapes[at] = size;
      strides[at] = stride;
      is_contiguous &= size == 1 || stride == dense;
      is_empty |= size == 0;
      dense =
          static_cast<std::int64_t>(static_cast<std::uint64_t>(dense) *
                                    static_cast<std::uint64_t>(std::max<std::int64_t>(size, 1)));
    }
    used += static_cast<std::size_t>(tensor.dimensions);
    return is_contiguous || is_empty;
  }
};

rk_tensor_layout layout_of(const DlTensor& tensor, Dimensions& dimensions) {
  rk_tensor_layout layout{};
  layout.data = tensor.data == nullptr
                    ? 0
                    : reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
  layout.device_type = tensor.device_type;
  layout.device_id = tensor.device_id;
  layout.dtype_code = tensor.dtype_code;
  layout.dtype_bits = tensor.dtype_bits;
  layout.dtype_lanes = tensor.dtype_lanes;
  layout.dimensions = static_cast<std::uint32_t>(tensor.dimensions);
  layout.first_dimension = dimensions.used;
  layout.contiguous = dimensions.add(tensor) ? 1 : 0;
  return layout;
}

// Describing a tensor mostly waits for memory; these hints save a third of the time. The pointer to
// the tensor follows the two words of every Python object. Whatever is there, a hint cannot fault.
void prefetch_objects(std::span<void* const> next) {
  constexpr std::size_t kObject = 8;
  constexpr std::size_t kTensor = 4;
  constexpr std::size_t kLine = 64;
  if (next.size() > kObject) __builtin_prefetch(next[kObject]);
  if (next.size() <= kTensor || next[kTensor] == nullptr) return;
  const auto tensor = static_cast<const std::uintptr_t*>(next[kTensor])[2];
  for (std::size_t line = 0; line < 3; ++line) {
    // It was an integer so far, because it may not be a pointer.
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    __builtin_prefetch(reinterpret_cast<const void*>(tensor + line * kLine));
  }
}

}  // namespace

extern "C" {

RK_API int32_t rk_describe_tensors(rk_dlpack_exporter exporter, void* const* objects, size_t count,
                                   rk_tensor_layout* layouts, int64_t* shapes, int64_t* strides,
                                   size_t capacity, size_t* described, rk_error* error) {
  if (described != nullptr) *described = 0;
  return guarded(error, [&]() -> Result<void> {
    if (exporter == nullptr || described == nullptr) {
      return fail(ErrorCode::kInvalid, "`exporter` or `described` is null");
    }
    if (count > 0 && (objects == nullptr || layouts == nullptr)) {
      return fail(ErrorCode::kInvalid, "{} objects, but `objects` or `layouts` is null", count);
    }
    if (capacity > 0 && (shapes == nullptr || strides == nullptr)) {
      return fail(ErrorCode::kInvalid, "room for {} dimensions, but `shapes` or `strides` is null",
                  capacity);
    }
    Dimensions dimensions{{shapes, capacity}, {strides, capacity}};
    for (std::size_t i = 0; i < count; ++i) {
      prefetch_objects({objects + i, count - i});
      if (objects[i] == nullptr) return fail(ErrorCode::kInvalid, "object {} is null", i);
      DlTensor tensor{};
      if (exporter(objects[i], &tensor) != 0) {
        return fail(ErrorCode::kInvalid, "object {} of {} is no tensor that DLPack can describe", i,
                    count);
      }
      if (tensor.dimensions < 0 || (tensor.dimensions > 0 && tensor.shape == nullptr)) {
        return fail(ErrorCode::kInvalid, "object {} of {} says it has {} dimensions and no shape",
                    i, count, tensor.dimensions);
      }
      if (!dimensions.have_room_for(static_cast<std::size_t>(tensor.dimensions))) {
        return fail(ErrorCode::kExhausted,
                    "{} dimensions of {} are used, and object {} has {}: give more room",
                    dimensions.used, capacity, i, tensor.dimensions);
      }
      layouts[i] = layout_of(tensor, dimensions);
      *described = i + 1;
    }
    return {};
  });
}

}  // extern "C"

}  // namespace rekindle::client
