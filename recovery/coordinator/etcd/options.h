#pragma once

#include <chrono>
#include <string>

namespace rekindle::coordinator::etcd {

struct EtcdOptions {
  std::string urls;                   // "http://10.0.0.1:2379,http://10.0.0.2:2379"; empty: no etcd
  std::string prefix = "/rekindle/";  // of all keys; one per fleet
  std::chrono::seconds ttl{5};        // another coordinator leads so long after this one's death
};

}  // namespace rekindle::coordinator::etcd
