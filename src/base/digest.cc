#include "src/base/digest.h"

#include <new>

#include "src/base/digest_kernels.h"
#include "src/base/ids.h"

namespace rekindle {

namespace {

using digest_detail::Kernels;

const Kernels& choose_kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return digest_detail::kAvx512;
  if (__builtin_cpu_supports("avx2")) return digest_detail::kAvx2;
#endif
  return digest_detail::kSse2;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose_kernels();
  return chosen;
}

}  // namespace

std::string Digest128::hex() const { return fmt::format("{:016x}{:016x}", high, low); }

Result<Digest128> Digest128::from_hex(std::string_view text) {
  std::uint8_t bytes[16];
  if (!rekindle::from_hex(text, bytes, sizeof bytes)) {
    return fail(ErrorCode::kInvalid, "'{}' is not a digest of 32 hexadecimal digits", text);
  }
  Digest128 digest;
  for (int i = 0; i < 8; ++i) {
    digest.high = digest.high << 8 | bytes[i];
    digest.low = digest.low << 8 | bytes[8 + i];
  }
  return digest;
}

std::uint64_t xxh3_64(std::span<const std::byte> bytes, std::uint64_t seed) {
  return kernels().hash64(bytes.data(), bytes.size(), seed);
}

Digest128 xxh3_128(std::span<const std::byte> bytes, std::uint64_t seed) {
  Digest128 digest;
  kernels().hash128(bytes.data(), bytes.size(), seed, &digest.low, &digest.high);
  return digest;
}

struct Hasher64::State {
  State() : raw(kernels().create()) {
    if (raw == nullptr) throw std::bad_alloc();
  }
  ~State() { kernels().destroy(raw); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  void* raw;
};

Hasher64::Hasher64(std::uint64_t seed) : state_(std::make_unique<State>()) { reset(seed); }
Hasher64::~Hasher64() = default;
void Hasher64::reset(std::uint64_t seed) { kernels().reset(state_->raw, seed); }
void Hasher64::update(std::span<const std::byte> bytes) {
  kernels().update(state_->raw, bytes.data(), bytes.size());
}
std::uint64_t Hasher64::digest() const { return kernels().digest(state_->raw); }

std::string_view digest_simd_level() { return kernels().name; }

}  // namespace rekindle
