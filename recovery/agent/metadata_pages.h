#pragma once

#include <list>
#include <memory>
#include <string>
#include <utility>

#include "proto/agent.pb.h"
#include "recovery/agent/served_versions.h"
#include "recovery/rpc/rpc.h"
#include "src/async/task.h"
#include "src/base/worker_pool.h"

namespace rekindle::agent {

// Answers pullers with pages of metadata: tensor sets, layouts, tile digests and the small files of
// a checkpoint. The last few are kept as bytes, so that the pages of a 30 MB tensor set are cut
// from one serialization. Control thread only.
class MetadataPages {
 public:
  MetadataPages(const rpc::Identity& identity, ServedVersions& served, WorkerPool& digest_pool)
      : identity_(identity), served_(served), digest_pool_(digest_pool) {}

  async::Task<Result<proto::GetPageResponse>> get(proto::GetPageRequest request);

 private:
  struct Key {
    int kind = 0;
    Digest digest;
    std::string name;
    bool operator==(const Key&) const = default;
  };
  using Blob = std::shared_ptr<const std::string>;
  Blob find(const Key& key);
  Blob keep(const Key& key, std::string blob);
  Result<std::string> serialize(const proto::GetPageRequest& request) const;
  async::Task<Result<std::string>> read_file(proto::GetPageRequest request);
  Error not_held(const proto::GetPageRequest& request) const;

  const rpc::Identity& identity_;
  ServedVersions& served_;
  WorkerPool& digest_pool_;
  // The one that was used last comes first. Only verified bytes are kept.
  std::list<std::pair<Key, Blob>> kept_;
};

}  // namespace rekindle::agent
