#pragma once

#include "transport/verbs/verbs_transport.h"

namespace rekindle::transport::verbs {

// The devices of this host, as if they had no memory windows.
class WithoutWindows final : public SystemApi {
 public:
  int query_device(ibv_context* context, ibv_device_attr* attr) override {
    const int error = SystemApi::query_device(context, attr);
    attr->device_cap_flags &= ~unsigned{IBV_DEVICE_MEM_WINDOW_TYPE_2B};
    return error;
  }
};

}  // namespace rekindle::transport::verbs
