#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>

#include <sys/mman.h>

#include "src/base/units.h"
#include "tests/verbs/fake_state.h"
#include "tests/verbs/fake_verbs.h"

// Memory regions and windows, and what their keys allow.
namespace rekindle::transport::verbs {
namespace {

constexpr std::uint32_t kIndexShift = 8;

std::uint32_t key_of(std::uint32_t index, std::uint32_t low) { return index << kIndexShift | low; }

enum class Mapping { kNone, kReadOnly, kWritable };

// Of all pages in the range, the least that is allowed.
Mapping mapping_at(std::uint64_t address, std::uint64_t bytes) {
  std::FILE* const maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return Mapping::kWritable;
  Mapping result = Mapping::kWritable;
  std::uint64_t at = address;
  char line[512];
  while (at < address + bytes && std::fgets(line, sizeof line, maps) != nullptr) {
    std::uint64_t begin = 0, end = 0;
    char rights[5] = {};
    if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &begin, &end, rights) != 3) continue;
    if (end <= at) continue;
    if (begin > at) break;  // a hole
    if (rights[1] != 'w') result = Mapping::kReadOnly;
    at = end;
  }
  (void)std::fclose(maps);
  return at < address + bytes ? Mapping::kNone : result;
}

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

// Faults the pages in as a device's pinning does. False: there is not a page everywhere, as beyond
// the end of a truncated file.
bool pin(std::uint64_t address, std::uint64_t bytes, bool writable) {
  const std::uint64_t begin = address / kPageBytes * kPageBytes;
  const std::uint64_t end = round_up(address + bytes, kPageBytes);
  const int advice = writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  return ::madvise(reinterpret_cast<void*>(begin), end - begin, advice) == 0 || errno != EFAULT;
}

int check_region(const DeviceObject& device, std::uint64_t address, std::uint64_t bytes,
                 int access) {
  if (bytes == 0 || bytes > device.spec.attr.max_mr_size || address + bytes < address) {
    return EINVAL;
  }
  constexpr int kRemoteWrites = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  if ((access & kRemoteWrites) != 0 && (access & IBV_ACCESS_LOCAL_WRITE) == 0) return EINVAL;
  constexpr int kKnown = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                         IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_HUGETLB |
                         IBV_ACCESS_RELAXED_ORDERING;
  if ((access & ~kKnown) != 0) return EINVAL;
  const bool relaxed = (access & IBV_ACCESS_RELAXED_ORDERING) != 0;
  if (relaxed && !device.spec.takes_relaxed_ordering) return EINVAL;
  if (static_cast<int>(device.by_lkey.size()) >= device.spec.attr.max_mr) return ENOMEM;
  const std::uint64_t limit = device.spec.max_registered_bytes;
  if (limit != 0 && !in_range(device.registered_bytes, bytes, limit)) return ENOMEM;
  return 0;
}

int check_pages(const DeviceObject& device, std::uint64_t address, std::uint64_t bytes,
                int access) {
  const Mapping mapping = mapping_at(address, bytes);
  if (mapping == Mapping::kNone) return EFAULT;
  const bool writes = (access & (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)) != 0;
  if (mapping == Mapping::kReadOnly && (writes || !device.spec.takes_read_only)) return EFAULT;
  const bool pins_for_writing = writes || !device.spec.takes_read_only;
  return !device.spec.pins_pages || pin(address, bytes, pins_for_writing) ? 0 : EFAULT;
}

template <typename T>
T* failed(int error) {
  errno = error;
  return nullptr;
}

struct Region {
  void* address;
  std::size_t bytes;
  std::uint64_t iova;
  int access;
};

ibv_mr* add_region(FakeState& state, DeviceObject& device, PdObject& pd, const Region& region) {
  auto mr = std::make_unique<MrObject>();
  const std::uint32_t index = device.next_index++;
  mr->context = pd.context;
  mr->pd = &pd;
  mr->addr = region.address;
  mr->length = region.bytes;
  mr->iova = region.iova;
  mr->access = region.access;
  // Distinct, so that a test finds one taken for the other.
  mr->lkey = key_of(index, 0x10);
  mr->rkey = key_of(index, 0x80);
  device.by_lkey[mr->lkey] = mr.get();
  device.by_rkey[mr->rkey] = mr.get();
  device.registered_bytes += region.bytes;
  ++pd.children;
  MrObject* const handle = mr.get();
  state.mrs.emplace(handle, std::move(mr));
  return handle;
}

bool contains(std::uint64_t begin, std::uint64_t size, std::uint64_t address, std::uint64_t bytes) {
  return address >= begin && in_range(address - begin, bytes, size);
}

MrObject* region_by_lkey(const QpObject& qp, const ibv_sge& entry) {
  const auto found = qp.owner->by_lkey.find(entry.lkey);
  if (found == qp.owner->by_lkey.end()) return nullptr;
  MrObject& mr = *found->second;
  const bool inside = contains(mr.iova, mr.length, entry.addr, entry.length);
  return mr.pd == qp.pd && inside ? &mr : nullptr;
}

std::byte* host_address(const MrObject& mr, std::uint64_t address) {
  return static_cast<std::byte*>(mr.addr) + (address - mr.iova);
}

MrObject* region_by_rkey(QpObject& qp, std::uint64_t address, std::uint64_t bytes,
                         std::uint32_t rkey) {
  const auto window = qp.owner->windows.find(rkey >> kIndexShift);
  if (window != qp.owner->windows.end()) {
    const MwObject& mw = *window->second;
    const bool allowed = mw.mr != nullptr && mw.key == rkey && mw.qp == &qp && mw.pd == qp.pd &&
                         (mw.access & IBV_ACCESS_REMOTE_READ) != 0 &&
                         contains(mw.address, mw.bytes, address, bytes);
    return allowed ? mw.mr : nullptr;
  }
  const auto found = qp.owner->by_rkey.find(rkey);
  if (found == qp.owner->by_rkey.end()) return nullptr;
  MrObject& mr = *found->second;
  const bool allowed = mr.pd == qp.pd && (mr.access & IBV_ACCESS_REMOTE_READ) != 0 &&
                       contains(mr.iova, mr.length, address, bytes);
  return allowed ? &mr : nullptr;
}

// A READ that is under way and touches the region, at either end.
bool is_read_now(FakeState& state, const MrObject& mr) {
  for (const auto& [handle, qp] : state.qps) {
    for (const SendRequest& request : qp->sends) {
      if (request.wr.opcode != IBV_WR_RDMA_READ) continue;
      for (const ibv_sge& entry : request.sges) {
        if (qp->owner == mr.pd->context->device && entry.lkey == mr.lkey) return true;
      }
      if (qp->ibv_qp::state != IBV_QPS_RTS) continue;
      QpObject* const peer = find_peer(state, *qp);
      if (peer == nullptr || peer->context->device != mr.context->device) continue;
      const auto& target = request.wr.wr.rdma;
      if (region_by_rkey(*peer, target.remote_addr, 0, target.rkey) == &mr) return true;
    }
  }
  return false;
}

}  // namespace

ibv_mr* FakeVerbs::reg_mr(ibv_pd* handle, void* address, std::size_t bytes, int access) {
  Lock lock(state_.mutex);
  PdObject* const pd = state_.find(state_.pds, handle, "reg_mr");
  if (pd == nullptr) return failed<ibv_mr>(EINVAL);
  DeviceObject& device = *static_cast<ContextObject*>(pd->context)->owner;
  int error = begin_call(state_, lock, device, FakeCall::kRegMr);
  const auto begin = reinterpret_cast<std::uint64_t>(address);
  if (error == 0) error = check_region(device, begin, bytes, access);
  if (error == 0) error = check_pages(device, begin, bytes, access);
  if (error != 0) return failed<ibv_mr>(error);
  return add_region(state_, device, *pd, {address, bytes, begin, access});
}

// The descriptor of a memory file stands for the GPU's memory: its pages are mapped here.
ibv_mr* FakeVerbs::reg_dmabuf_mr(ibv_pd* handle, std::uint64_t offset, std::size_t bytes,
                                 std::uint64_t iova, int fd, int access) {
  Lock lock(state_.mutex);
  PdObject* const pd = state_.find(state_.pds, handle, "reg_dmabuf_mr");
  if (pd == nullptr) return failed<ibv_mr>(EINVAL);
  DeviceObject& device = *static_cast<ContextObject*>(pd->context)->owner;
  int error = begin_call(state_, lock, device, FakeCall::kRegDmabufMr);
  if (error == 0) error = check_region(device, iova, bytes, access);
  if (error == 0 && offset % kPageBytes != iova % kPageBytes) error = EINVAL;
  if (error != 0) return failed<ibv_mr>(error);
  const std::uint64_t lead = offset % kPageBytes;
  void* const mapped = ::mmap(nullptr, bytes + lead, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                              static_cast<off_t>(offset - lead));
  if (mapped == MAP_FAILED) return failed<ibv_mr>(errno);
  ibv_mr* const mr = add_region(state_, device, *pd,
                                {static_cast<std::byte*>(mapped) + lead, bytes, iova, access});
  static_cast<MrObject*>(mr)->mapped_lead = static_cast<std::int64_t>(lead);
  return mr;
}

int FakeVerbs::dereg_mr(ibv_mr* handle) {
  Lock lock(state_.mutex);
  MrObject* mr = state_.find(state_.mrs, handle, "dereg_mr");
  if (mr == nullptr) return EINVAL;
  DeviceObject& device = *static_cast<ContextObject*>(mr->context)->owner;
  const int error = begin_call(state_, lock, device, FakeCall::kDeregMr);
  if (error != 0 && !device.removed) return error;
  if (mr->windows > 0) return EBUSY;
  if (is_read_now(state_, *mr)) {
    state_.problem("dereg_mr on {}: a READ of {} bytes at {} is under way", device.key, mr->length,
                   mr->addr);
  }
  device.by_lkey.erase(mr->lkey);
  device.by_rkey.erase(mr->rkey);
  device.registered_bytes -= mr->length;
  --static_cast<PdObject*>(mr->pd)->children;
  if (mr->mapped_lead >= 0) {
    ::munmap(static_cast<std::byte*>(mr->addr) - mr->mapped_lead,
             mr->length + static_cast<std::size_t>(mr->mapped_lead));
  }
  state_.mrs.erase(handle);
  return 0;
}

ibv_mw* FakeVerbs::alloc_mw(ibv_pd* handle, ibv_mw_type type) {
  Lock lock(state_.mutex);
  PdObject* const pd = state_.find(state_.pds, handle, "alloc_mw");
  if (pd == nullptr) return failed<ibv_mw>(EINVAL);
  DeviceObject& device = *static_cast<ContextObject*>(pd->context)->owner;
  int error = begin_call(state_, lock, device, FakeCall::kAllocMw);
  const auto& attr = device.spec.attr;
  if (error == 0 && (attr.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) == 0)
    error = EOPNOTSUPP;
  if (error == 0 && type != IBV_MW_TYPE_2) error = EINVAL;
  if (error == 0 && static_cast<int>(device.windows.size()) >= attr.max_mw) error = ENOMEM;
  if (error != 0) return failed<ibv_mw>(error);
  auto mw = std::make_unique<MwObject>();
  const std::uint32_t index = device.next_index++;
  mw->context = pd->context;
  mw->pd = handle;
  mw->type = type;
  mw->rkey = mw->key = key_of(index, 0);
  device.windows[index] = mw.get();
  ++pd->children;
  MwObject* const result = mw.get();
  state_.mws.emplace(result, std::move(mw));
  return result;
}

int FakeVerbs::dealloc_mw(ibv_mw* handle) {
  Lock lock(state_.mutex);
  MwObject* mw = state_.find(state_.mws, handle, "dealloc_mw");
  if (mw == nullptr) return EINVAL;
  DeviceObject& device = *static_cast<ContextObject*>(mw->context)->owner;
  const int error = begin_call(state_, lock, device, FakeCall::kDeallocMw);
  if (error != 0 && !device.removed) return error;
  unbind(*mw);
  device.windows.erase(mw->key >> kIndexShift);
  --static_cast<PdObject*>(mw->pd)->children;
  state_.mws.erase(handle);
  return 0;
}

std::byte* local_address(QpObject& qp, const ibv_sge& entry, Rights rights) {
  MrObject* const mr = region_by_lkey(qp, entry);
  if (mr == nullptr) return nullptr;
  if (rights == Rights::kWriteLocal && (mr->access & IBV_ACCESS_LOCAL_WRITE) == 0) return nullptr;
  return host_address(*mr, entry.addr);
}

const std::byte* remote_address(QpObject& qp, std::uint64_t address, std::uint64_t bytes,
                                std::uint32_t rkey) {
  MrObject* const mr = region_by_rkey(qp, address, bytes, rkey);
  return mr == nullptr ? nullptr : host_address(*mr, address);
}

// IBTA o10-37.2: a window of type 2 is bound when it is free, with a new key of the same index.
ibv_wc_status bind_window(FakeState& state, QpObject& qp, const ibv_send_wr& wr) {
  const auto& bind = wr.bind_mw;
  const auto window = state.mws.find(bind.mw);
  const auto region = state.mrs.find(bind.bind_info.mr);
  if (window == state.mws.end() || region == state.mrs.end()) return IBV_WC_MW_BIND_ERR;
  MwObject& mw = *window->second;
  MrObject& mr = *region->second;
  const auto& info = bind.bind_info;
  const bool new_key = bind.rkey >> kIndexShift == mw.key >> kIndexShift && bind.rkey != mw.key;
  const bool allowed =
      mw.mr == nullptr && new_key && mw.pd == qp.pd && mr.pd == qp.pd &&
      (mr.access & IBV_ACCESS_MW_BIND) != 0 &&
      (info.mw_access_flags & ~static_cast<unsigned>(IBV_ACCESS_REMOTE_READ)) == 0 &&
      info.length > 0 && contains(mr.iova, mr.length, info.addr, info.length);
  if (!allowed) return IBV_WC_MW_BIND_ERR;
  mw.key = bind.rkey;
  mw.mr = &mr;
  mw.qp = &qp;
  mw.address = info.addr;
  mw.bytes = info.length;
  mw.access = info.mw_access_flags;
  ++mr.windows;
  return IBV_WC_SUCCESS;
}

ibv_wc_status invalidate_window(QpObject& qp, std::uint32_t rkey) {
  const auto found = qp.owner->windows.find(rkey >> kIndexShift);
  if (found == qp.owner->windows.end()) return IBV_WC_LOC_QP_OP_ERR;
  MwObject& mw = *found->second;
  if (mw.mr == nullptr || mw.key != rkey || mw.qp != &qp) return IBV_WC_LOC_QP_OP_ERR;
  unbind(mw);
  return IBV_WC_SUCCESS;
}

void unbind(MwObject& mw) {
  if (mw.mr != nullptr) --mw.mr->windows;
  mw.mr = nullptr;
  mw.qp = nullptr;
}

// They answer to no one any more, but the region stays busy until they are deallocated.
std::size_t forget_queue_pair(FakeState& state, QpObject& qp) {
  std::size_t count = 0;
  for (const auto& [handle, mw] : state.mws) {
    if (mw->qp != &qp) continue;
    mw->qp = nullptr;
    ++count;
  }
  return count;
}

}  // namespace rekindle::transport::verbs
