#include <cstring>
#include <string>
#include <utility>

#include "src/cuda/nccl.h"

namespace rekindle::cuda {

#if REKINDLE_WITH_NCCL

namespace {

class NcclCollective final : public bucket::Collective {
 public:
  NcclCollective(std::shared_ptr<const Nccl> nccl, std::unique_ptr<Communicator> communicator)
      : nccl_(std::move(nccl)), communicator_(std::move(communicator)) {}

  std::uint32_t rank() const override { return static_cast<std::uint32_t>(communicator_->rank()); }
  std::uint32_t ranks() const override {
    return static_cast<std::uint32_t>(communicator_->ranks());
  }

  Result<void> spread(bucket::DeviceAddress at, std::uint64_t share_bytes,
                      std::span<const std::uint32_t> owners, bucket::Stream& stream) override {
    TRY_VOID(check_lives());
    for (const std::uint32_t owner : owners) {
      if (owner < ranks()) continue;
      return fail(ErrorCode::kInvalid, "a share is said to be rank {}'s of {}", owner, ranks());
    }
    if (is_everybody(owners)) {
      return communicator_->all_gather(at + rank() * share_bytes, at, share_bytes, stream);
    }
    return nccl_->group(*communicator_, [&]() -> Result<void> {
      bucket::DeviceAddress share = at;
      for (const std::uint32_t owner : owners) {
        TRY_VOID(
            communicator_->broadcast(share, share, share_bytes, static_cast<int>(owner), stream));
        share += share_bytes;
      }
      return {};
    });
  }

  Result<bool> settled() override {
    TRY_VOID(check_lives());
    return communicator_->settled();
  }

  void abort() override {
    aborted_ = true;
    communicator_->abort();
  }

 private:
  Result<void> check_lives() const {
    if (!aborted_) return {};
    return fail(ErrorCode::kStale, "rank {} of {} was aborted: meet again", rank(), ranks());
  }
  // If every rank owns the share of its own number, an all-gather in place does the same.
  bool is_everybody(std::span<const std::uint32_t> owners) const {
    if (owners.size() != ranks()) return false;
    for (std::uint32_t i = 0; i < ranks(); ++i) {
      if (owners[i] != i) return false;
    }
    return true;
  }

  const std::shared_ptr<const Nccl> nccl_;
  const std::unique_ptr<Communicator> communicator_;
  bool aborted_ = false;
};

class NcclCollectives final : public bucket::Collectives {
 public:
  explicit NcclCollectives(std::shared_ptr<const Nccl> nccl) : nccl_(std::move(nccl)) {}

  Result<std::string> make_id() override {
    TRY(const Nccl::UniqueId id, nccl_->make_id());
    return std::string(reinterpret_cast<const char*>(id.data()), id.size());
  }
  Result<std::unique_ptr<bucket::Collective>> meet(bucket::Device& device, std::uint32_t rank,
                                                   std::uint32_t ranks,
                                                   std::string_view id) override {
    Nccl::UniqueId unique{};
    if (id.size() != unique.size() || rank >= ranks) {
      return fail(ErrorCode::kInvalid, "rank {} of {} cannot meet by an id of {} bytes", rank,
                  ranks, id.size());
    }
    std::memcpy(unique.data(), id.data(), unique.size());
    TRY(auto communicator,
        Communicator::start(nccl_, device,
                            {.rank = static_cast<int>(rank), .ranks = static_cast<int>(ranks)},
                            unique));
    return std::make_unique<NcclCollective>(nccl_, std::move(communicator));
  }

 private:
  const std::shared_ptr<const Nccl> nccl_;
};

}  // namespace

Result<std::unique_ptr<bucket::Collectives>> make_nccl_collectives() {
  TRY(auto nccl, Nccl::load());
  return std::make_unique<NcclCollectives>(std::move(nccl));
}

#else

Result<std::unique_ptr<bucket::Collectives>> make_nccl_collectives() {
  return fail(ErrorCode::kNotFound,
              "this build has no NCCL: install libnccl-dev and configure it again");
}

#endif

}  // namespace rekindle::cuda
