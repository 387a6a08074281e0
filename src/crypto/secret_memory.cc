#include "src/crypto/secret_memory.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory_resource>
#include <mutex>
#include <new>
#include <stdexcept>

#include <pthread.h>
#include <sys/mman.h>

#include <openssl/crypto.h>

#include "src/crypto/hmac.h"

#if defined(__SANITIZE_ADDRESS__)
#define REKINDLE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define REKINDLE_ASAN 1
#endif
#endif
#ifdef REKINDLE_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/lsan_interface.h>
#endif

namespace rekindle::crypto {

namespace {

constexpr std::size_t kAlignment = 16;
#ifdef REKINDLE_ASAN
constexpr std::size_t kGuardBytes = kAlignment;
// AddressSanitizer reports each use of these bytes.
void forbid(std::byte* at, std::size_t bytes) { ASAN_POISON_MEMORY_REGION(at, bytes); }
void permit(std::byte* at, std::size_t bytes) { ASAN_UNPOISON_MEMORY_REGION(at, bytes); }
// LeakSanitizer follows the pointers in these bytes.
void follow(void* at, std::size_t bytes) { __lsan_register_root_region(at, bytes); }
void unfollow(void* at, std::size_t bytes) { __lsan_unregister_root_region(at, bytes); }
#else
constexpr std::size_t kGuardBytes = 0;
void forbid(std::byte*, std::size_t) {}
void permit(std::byte*, std::size_t) {}
void follow(void*, std::size_t) {}
void unfollow(void*, std::size_t) {}
#endif

class UndumpedPages : public std::pmr::memory_resource {
  void* do_allocate(std::size_t bytes, std::size_t) override {
    void* const at =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    if (::madvise(at, bytes, MADV_DONTDUMP) != 0) {
      ::munmap(at, bytes);
      throw std::bad_alloc();
    }
    follow(at, bytes);
    return at;
  }
  void do_deallocate(void* at, std::size_t bytes, std::size_t) override {
    unfollow(at, bytes);
    permit(static_cast<std::byte*>(at), bytes);
    ::munmap(at, bytes);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

class Arena {
 public:
  Arena() {
    // A child of fork() has only the thread that called it, which must not find the lock held.
    ::pthread_atfork([] { arena().mutex_.lock(); }, [] { arena().mutex_.unlock(); },
                     [] { arena().mutex_.unlock(); });
  }

  // Never destroyed: OpenSSL frees its last objects when the process exits.
  static Arena& arena() {
    static auto* const kArena = new Arena;
    return *kArena;
  }

  void* allocate(std::size_t bytes) {
    const std::size_t size = size_of_block(bytes);
    const std::lock_guard lock(mutex_);
    auto* const block = static_cast<std::byte*>(pool_.allocate(size, kAlignment));
    permit(block, bytes);
    forbid(block + bytes, size - bytes);
    return block;
  }

  void release(void* block, std::size_t bytes) {
    const std::size_t size = size_of_block(bytes);
    const std::lock_guard lock(mutex_);
    forbid(static_cast<std::byte*>(block), size);
    pool_.deallocate(block, size, kAlignment);
  }

 private:
  // A multiple of the alignment, because the pools of libstdc++ 12 align by the size alone.
  static std::size_t size_of_block(std::size_t bytes) {
    if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
    const std::size_t most = std::max<std::size_t>(bytes + kGuardBytes, 1);
    return (most + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Guards the rest.
  std::mutex mutex_;
  UndumpedPages pages_;
  // Blocks up to this size, such as the records of TLS, come from pools. A larger one is a mapping
  // by itself.
  std::pmr::unsynchronized_pool_resource pool_{{0, 32 << 10}, &pages_};
};

// OpenSSL does not tell the size of a block that it frees.
struct alignas(kAlignment) Header {
  std::size_t bytes;
};

Header* header_of(void* block) { return static_cast<Header*>(block) - 1; }

void* openssl_malloc(std::size_t bytes, const char*, int) {
  if (bytes > SIZE_MAX / 2) return nullptr;
  try {
    const std::size_t all = bytes + sizeof(Header);
    return new (Arena::arena().allocate(all)) Header{all} + 1;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// OpenSSL wipes what is secret itself.
void openssl_free(void* block, const char*, int) {
  if (block == nullptr) return;
  Header* const header = header_of(block);
  Arena::arena().release(header, header->bytes);
}

void* openssl_realloc(void* block, std::size_t bytes, const char* file, int line) {
  void* const moved = bytes == 0 ? nullptr : openssl_malloc(bytes, file, line);
  if (bytes != 0 && moved == nullptr) return nullptr;
  if (block != nullptr && moved != nullptr) {
    std::memcpy(moved, block, std::min(bytes, header_of(block)->bytes - sizeof(Header)));
  }
  openssl_free(block, file, line);
  return moved;
}

}  // namespace

void* allocate_secret(std::size_t bytes) { return Arena::arena().allocate(bytes); }

void free_secret(void* block, std::size_t bytes) {
  OPENSSL_cleanse(block, bytes);
  Arena::arena().release(block, bytes);
}

void keep_openssl_secret() {
  if (CRYPTO_set_mem_functions(openssl_malloc, openssl_realloc, openssl_free) != 1) {
    throw std::logic_error("OpenSSL was used before its memory was chosen");
  }
}

bool Secret::operator==(const Secret& other) const {
  return equal_constant_time(reveal(), other.reveal());
}

}  // namespace rekindle::crypto
