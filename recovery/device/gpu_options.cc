#include "recovery/device/gpu_options.h"

#include <charconv>

namespace rekindle::device {

namespace {
constexpr std::uint32_t kMostDoubles = 64;
constexpr std::string_view kDoublePrefix = "double:";
}  // namespace

bool built_with_cuda() { return REKINDLE_WITH_CUDA; }

Result<Doubles> parse_doubles(std::string_view text) {
  Doubles doubles;
  const auto colon = text.find(':');
  const std::string_view count = text.substr(0, colon);
  const auto [end, error] =
      std::from_chars(count.data(), count.data() + count.size(), doubles.count);
  if (error != std::errc() || end != count.data() + count.size() || doubles.count == 0 ||
      doubles.count > kMostDoubles) {
    return fail(ErrorCode::kInvalid, "'{}' is no number of doubles from 1 to {}", count,
                kMostDoubles);
  }
  if (colon == std::string_view::npos) return doubles;
  TRY(doubles.bytes, parse_bytes(text.substr(colon + 1)));
  if (doubles.bytes == 0) return fail(ErrorCode::kInvalid, "a double needs some memory");
  return doubles;
}

Result<GpuOptions> parse_gpu(std::string_view text) {
  GpuOptions options;
  if (text == "auto") return options;
  if (text == "none") {
    options.use = GpuOptions::Use::kNone;
    return options;
  }
  if (!text.starts_with(kDoublePrefix)) {
    return fail(ErrorCode::kInvalid, "'{}' is none of auto, none, double:N[:BYTES]", text);
  }
  options.use = GpuOptions::Use::kDouble;
  TRY(options.doubles, parse_doubles(text.substr(kDoublePrefix.size())));
  return options;
}

}  // namespace rekindle::device
