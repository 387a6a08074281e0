#include "recovery/device/gpu_options.h"

#include <charconv>

namespace rekindle::device {

namespace {
constexpr std::uint32_t kMostDoubles = 64;
constexpr std::uint32_t kMostHelpers = 15;
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

Result<std::uint32_t> parse_helpers(std::string_view text) {
  if (text == "auto") return GpuOptions::kAutoHelpers;
  if (text == "none") return 0;
  std::uint32_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error == std::errc() && end == text.data() + text.size() && count <= kMostHelpers) {
    return count;
  }
  return fail(ErrorCode::kInvalid, "'{}' is none of auto, none, 0 to {}", text, kMostHelpers);
}

}  // namespace rekindle::device
