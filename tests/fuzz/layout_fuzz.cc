// The canonical bytes of a layout (odd first byte; magic and tensor set are put in front) or of a
// tensor set (even). What parses must obey the rules of src/tensor/layout.h and serialize to
// itself.
#include <cstdint>
#include <string>

#include "src/tensor/layout.h"
#include "src/tensor/tile.h"
#include "tests/fuzz/fuzz_check.h"

using namespace rekindle;

namespace {

const TensorSet& tensors() {
  static const TensorSet set = *TensorSet::create({{"cube", DType::kBF16, {4, 6, 8}},
                                                   {"empty", DType::kF32, {0, 3}},
                                                   {"matrix", DType::kF32, {64, 1024}},
                                                   {"scalar", DType::kI64, {}}});
  return set;
}

void check_layout(const std::string& tail) {
  std::string bytes = "RKLAYO01";
  bytes += tensors().digest().to_bytes() + tail;
  const auto layout = Layout::parse(tensors(), bytes);
  if (!layout) return;
  FUZZ_CHECK(layout->serialize() == bytes);
  const auto entries = layout->entries();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const LayoutEntry& a = entries[i];
    const TensorInfo& info = tensors()[a.tensor];
    FUZZ_CHECK(check_box(a.box, info.shape).has_value());
    const std::uint64_t size = a.box.elements() * dtype_size_bytes(info.dtype);
    FUZZ_CHECK(a.offset_bytes + size <= layout->segments()[a.segment].size_bytes);
    for (std::size_t j = 0; j < i && entries.size() < 200; ++j) {
      const LayoutEntry& b = entries[j];
      const std::uint64_t other = b.box.elements() * dtype_size_bytes(tensors()[b.tensor].dtype);
      FUZZ_CHECK(a.tensor != b.tensor || !intersect(a.box, b.box));
      FUZZ_CHECK(a.segment != b.segment || size == 0 || other == 0 ||
                 a.offset_bytes + size <= b.offset_bytes ||
                 b.offset_bytes + other <= a.offset_bytes);
    }
  }
}

void check_tensor_set(const std::string& bytes) {
  const auto set = TensorSet::parse(bytes);
  if (!set) return;
  FUZZ_CHECK(set->serialize() == bytes);
  for (const TensorInfo& tensor : set->tensors()) FUZZ_CHECK(set->find(tensor.name).has_value());
  (void)TileMap::create(*set);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 2 != 0) {
    check_layout(rest);
  } else {
    check_tensor_set(rest);
  }
  return 0;
}
