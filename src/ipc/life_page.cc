#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/ipc/life.h"

namespace rekindle::ipc {

namespace {

// Follows the word and names the format of the page.
constexpr std::uint32_t kLifePageFormat = 0x6c696665;

Result<void*> map_page(int fd) {
  void* const page = ::mmap(nullptr, kLifePageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) return fail_errno(errno, "map a life page");
  return page;
}

std::uint32_t* words(void* page) { return static_cast<std::uint32_t*>(page); }

}  // namespace

Result<std::unique_ptr<LifePage>> LifePage::create() {
  UniqueFd fd(::memfd_create("rekindle-life", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return fail_errno(errno, "create a life page");
  if (::ftruncate(fd.get(), kLifePageBytes) != 0) return fail_errno(errno, "size a life page");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return fail_errno(errno, "seal a life page");
  }
  TRY(void* const page, map_page(fd.get()));
  words(page)[1] = kLifePageFormat;
  return std::unique_ptr<LifePage>(new LifePage(std::move(fd), page));
}

Result<std::unique_ptr<LifePage>> LifePage::open(UniqueFd fd) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  struct stat info {};
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd.get(), &info) != 0 ||
      info.st_size != static_cast<off_t>(kLifePageBytes)) {
    return fail(ErrorCode::kInvalid, "the descriptor is not a life page");
  }
  TRY(void* const page, map_page(fd.get()));
  std::unique_ptr<LifePage> opened(new LifePage(std::move(fd), page));
  if (words(page)[1] != kLifePageFormat) {
    return fail(ErrorCode::kInvalid, "a life page of an unknown format ({:#x})", words(page)[1]);
  }
  return opened;
}

LifePage::~LifePage() { ::munmap(page_, kLifePageBytes); }

std::uint32_t* LifePage::word() const { return words(page_); }

}  // namespace rekindle::ipc
