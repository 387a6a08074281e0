/* librekindle: how a worker process gets model weights from the Rekindle agent of its host, and how
 * a trainer publishes them. A stable C ABI; link with -lrekindle.
 *
 *   rk_error error;
 *   rk_agent* agent;      rk_connect(NULL, &agent, &error);
 *   rk_session* session;  rk_attach(agent, &(rk_attach_options){.size = sizeof(rk_attach_options),
 *                             .model = "qwen3", .shard = "tp=3/8"}, &session, &error);
 *   const rk_tensor* tensors; size_t count;
 *   while (rk_next(session, 10000, &tensors, &count, &error) == RK_OK && count > 0) { copy them }
 *   rk_loaded(session, &error);                 // this rank has everything
 *   rk_wait_commit(session, 60000, &error);     // every rank of the instance has: serve
 *
 * Functions return RK_OK or the code of what went wrong; `error`, which may be NULL, then has the
 * same code and one line for a human. All are thread-safe; a session may be detached while other
 * threads' calls on it still run (they return RK_STALE). There is no global state. Structures begin
 * with their size, so that later versions can grow them. Times are milliseconds; a time-out of 0
 * asks and does not wait; there is no way to wait for ever.
 *
 * After fork() only the parent may use what it opened. When the agent dies, calls return
 * RK_PEER_LOST; mapped tensors stay readable; rk_attach on a new connection finds the agent's next
 * life and what was verified before.
 */
#ifndef REKINDLE_H
#define REKINDLE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define RK_API __attribute__((visibility("default")))
#else
#define RK_API
#endif

#define RK_API_VERSION 1

typedef enum rk_code {
  RK_OK = 0,
  RK_INVALID = 1,     /* the input is wrong: fix it, do not retry */
  RK_NOT_FOUND = 2,   /* no such model or version, or nobody holds it: the message names what */
  RK_TIMEOUT = 3,     /* not by the deadline; the session goes on, ask again */
  RK_PEER_LOST = 4,   /* the agent is gone: connect and attach again */
  RK_STALE = 5,       /* the session has ended: its version retired, or its instance moved on */
  RK_CORRUPT = 6,     /* bytes do not match their digest and nobody has better ones */
  RK_EXHAUSTED = 7,   /* out of memory, space or descriptors */
  RK_DENIED = 8,      /* not this user, or another root under that version */
  RK_UNAVAILABLE = 9, /* not now: try again with back-off */
  RK_INTERNAL = 10    /* a bug, or a file or device of this host that fails */
} rk_code;

typedef struct rk_error {
  int32_t code;
  char message[1020]; /* one line, UTF-8, ends with 0 */
} rk_error;

typedef struct rk_agent rk_agent;
typedef struct rk_session rk_session;
typedef struct rk_publication rk_publication;

RK_API uint32_t rk_api_version(void);        /* RK_API_VERSION of the library */
RK_API const char* rk_library_version(void); /* "0.1.0" */
RK_API const char* rk_code_name(int32_t code);

/* --- the agent of this host */

typedef struct rk_connect_options {
  uint32_t size;
  const char* store;  /* the agent's store; NULL: /dev/shm/rekindle */
  int64_t timeout_ms; /* 0: 5000 */
} rk_connect_options;

/* Waits for an agent that is away, being restarted for example.
 * RK_UNAVAILABLE: no agent serves that store by then. RK_DENIED: it is another user's. */
RK_API int32_t rk_connect(const rk_connect_options* options, rk_agent** agent, rk_error* error);
/* Ends its sessions, too. NULL is fine. */
RK_API void rk_disconnect(rk_agent* agent);

/* --- weights for a worker */

/* A part of a tensor: offsets and extents in elements, one per dimension. */
typedef struct rk_box {
  const char* tensor;  /* "": the smallest one, for who attaches to see rk_catalog() */
  uint32_t dimensions; /* 0: the whole tensor */
  const uint64_t* offset;
  const uint64_t* extent;
} rk_box;

typedef struct rk_attach_options {
  uint32_t size;
  const char* model;     /* "qwen3@41", or "qwen3": the newest version that is ready */
  const char* shard;     /* "tp=3/8"; NULL: everything, or `boxes` */
  const char* spec_json; /* contents of a shard spec; NULL: the built-in of the model's family */
  const rk_box* boxes;   /* instead of a shard */
  size_t box_count;
  const char* instance; /* NULL: an instance of one rank by itself */
  uint64_t generation;  /* same for all ranks of one start of the instance */
  uint32_t rank;
  uint32_t world;           /* 0: 1 */
  const char* fallback_dir; /* of safetensors files, when nobody alive holds the version; or NULL */
  int64_t timeout_ms;       /* until the version and its sources are known; 0: 10000 */
  /* Where the weights shall land. NULL: nowhere, rk_next() hands out host memory. "cuda": the
   * calling thread's current CUDA device; "cuda:1"; a UUID, "GPU-6f2c…"; "double:0": host memory
   * that stands in for a GPU, on machines without one (`rekindle agent --gpu double:1`). */
  const char* device;
  void* stream; /* CUstream or cudaStream_t whose work reads the buckets; NULL: the default */
  uint64_t bucket_bytes; /* 0: the agent's choice, 64 MiB, in an update 256 MiB; at most 256 MiB */
  /* Workers of a group move to new versions together, when an update says so (rk_update, `rekindle
   * update`): rk_wait_update returns then, and attaching to that version takes part. NULL: alone,
   * as soon as a version is ready. */
  const char* group;
} rk_attach_options;

RK_API int32_t rk_attach(rk_agent* agent, const rk_attach_options* options, rk_session** session,
                         rk_error* error);

typedef struct rk_session_info {
  uint32_t size; /* set by the caller */
  const char* model;
  uint64_t version;
  uint64_t bytes_done, bytes_total;
  uint32_t tensors;
  const char* rung; /* "local", "adopted", "peers", "fallback": the lowest so far */
  /* "ipc": the agent fills buckets that this process opens; "upload: WHY": this process uploads
   * from the host map, because that is not possible here (as of now: before the first bucket it may
   * fall to that); "": no device was asked for. */
  const char* device_path;
} rk_session_info;
/* Strings live as long as the session. */
RK_API int32_t rk_info(rk_session* session, rk_session_info* info, rk_error* error);

/* A name that begins with "__rekindle_file__/" is a small file that was published beside the
 * weights (config.json, tokenizer.json, …): U8, its bytes. Equal shapes and offsets of an array's
 * tensors are at one address: who reads very many reads each of them once. */
typedef struct rk_tensor {
  const char* name;
  const char* dtype; /* as in safetensors: "BF16", "F8_E4M3" */
  uint32_t dimensions;
  const uint64_t* shape;      /* of what is here */
  const uint64_t* offset;     /* of it in the whole tensor */
  const uint64_t* full_shape; /* of the whole tensor */
  /* Row-major, contiguous, read-only; as long as the session lives. It is the agent's memory, but
   * for a box that does not lie contiguously there (a copy, made when it is handed out). NULL for a
   * tensor without elements. */
  const void* data;
  uint64_t bytes;
} rk_tensor;

/* Every tensor of the version, also those that the session has nothing of, by name; `data` is NULL.
 * What it takes to choose boxes: attach to the smallest one first. As long as the session. */
RK_API int32_t rk_catalog(rk_session* session, const rk_tensor** tensors, size_t* count,
                          rk_error* error);

/* The next tensors that are here in full and verified, each once; `*count` 0 with RK_OK: there are
 * no more. The array lives as long as the session. RK_TIMEOUT: none came in time. */
RK_API int32_t rk_next(rk_session* session, int64_t timeout_ms, const rk_tensor** tensors,
                       size_t* count, rk_error* error);

/* --- the same on a device (rk_attach_options.device): these instead of rk_next() */

/* Every tensor of the session, in a fixed order; `data` is NULL. As long as the session lives. */
RK_API int32_t rk_tensors(rk_session* session, const rk_tensor** tensors, size_t* count,
                          rk_error* error);
/* A run of a tensor's row-major bytes. A tensor that is larger than a bucket comes in several. */
typedef struct rk_part {
  const rk_tensor* tensor;
  uint64_t offset_bytes; /* in the tensor */
  uint64_t bytes;        /* 0: a tensor without elements */
  void* data;            /* device memory, 256-byte aligned */
  uint64_t reserved[2];  /* 0 */
} rk_part;
/* The next bucket that is filled, in the order in which their bytes arrive. What reads it must be
 * queued on the session's stream before the next call, which gives the bucket back behind that.
 * `*count` 0 with RK_OK: there are no more; the buckets' memory has been let go. RK_TIMEOUT: none
 * came in time. RK_UNAVAILABLE: its device process is gone and the agent is not (else it is
 * RK_PEER_LOST); detach and attach again. The array lives as long as the session. */
RK_API int32_t rk_next_bucket(rk_session* session, int64_t timeout_ms, const rk_part** parts,
                              size_t* count, rk_error* error);
/* Where a tensor, or a box of one, shall be: device memory, contiguous, row-major. */
typedef struct rk_target {
  const char* tensor;
  const uint64_t* offset; /* of the box, as rk_tensor.offset; NULL: the session has one of it */
  void* data;
  uint64_t bytes;       /* RK_INVALID when it is not the tensor's */
  uint64_t reserved[2]; /* 0 */
} rk_target;
/* Takes every bucket and copies what the targets name to them, bucket by bucket in one batch, on
 * the session's stream; returns when all copies that it has queued are done, also when it fails
 * (but for a device that hangs for 10 s: the message says so). RK_NOT_FOUND: a target that the
 * session does not have, named; tensors without a target are skipped. RK_TIMEOUT: no bucket for
 * `timeout_ms`; call it again to go on, and keep the targets until then, or until rk_detach. */
RK_API int32_t rk_load_into(rk_session* session, const rk_target* targets, size_t count,
                            int64_t timeout_ms, rk_error* error);

/* For a thread of its own while another one finds out where tensors go, which for tens of thousands
 * takes as long as gigabytes of them: takes buckets into memory of its own on the device, so that
 * they go on being filled. At most `bytes`, and a quarter of what the device had free. Returns
 * RK_OK when it has them, when there are no more, at the time-out, when another call of this
 * session wants buckets, and at once while a bucket of rk_next_bucket is being read. Nothing is
 * lost: rk_load_into and rk_next_bucket begin with what it has taken, and let that memory go when
 * it has been read. RK_TIMEOUT: another call had the session all the time. Otherwise it fails as
 * rk_next_bucket. */
RK_API int32_t rk_prefetch(rk_session* session, uint64_t bytes, int64_t timeout_ms,
                           rk_error* error);

/* Says that this rank has taken in every tensor; does not wait (RK_INVALID before rk_next or
 * rk_next_bucket has handed out all). */
RK_API int32_t rk_loaded(rk_session* session, rk_error* error);
/* Until every rank of the instance has loaded the same version: only now may it serve.
 * RK_UNAVAILABLE names the rank that failed and why; call it again to wait for its next start. */
RK_API int32_t rk_wait_commit(rk_session* session, int64_t timeout_ms, rk_error* error);
/* Until the model has a newer version than this session's, or an update has begun for its group;
 * attach again for it, with the next generation when the instance has several ranks. */
RK_API int32_t rk_wait_update(rk_session* session, int64_t timeout_ms, uint64_t* version,
                              rk_error* error);
/* Unmaps the tensors. NULL is fine. */
RK_API void rk_detach(rk_session* session);

/* --- weights from a trainer */

typedef struct rk_tensor_spec {
  const char* name;
  const char* dtype;
  uint32_t dimensions;
  const uint64_t* shape;
} rk_tensor_spec;

/* "qwen3@42" with these tensors: memory of the agent's store, to be filled and committed. */
RK_API int32_t rk_publish_begin(rk_agent* agent, const char* model_version,
                                const rk_tensor_spec* tensors, size_t count,
                                rk_publication** publication, rk_error* error);
/* Where tensor `index` goes: writable, row-major, until commit or abandon. All of it is to be
 * written: what is there at first may be of another version. */
RK_API int32_t rk_publish_data(rk_publication* publication, size_t index, void** data,
                               uint64_t* bytes, rk_error* error);
/* Digests and makes it READY; the publication is over, whatever the outcome. RK_DENIED: the version
 * exists with other bytes. */
RK_API int32_t rk_publish_commit(rk_publication* publication, int64_t timeout_ms, rk_error* error);
RK_API void rk_publish_abandon(rk_publication* publication);

/* --- one version to all workers of a group, by broadcast where that is possible */

typedef struct rk_update_options {
  uint32_t size;
  const char* model_version; /* "qwen3@42", published before */
  const char* group;         /* NULL: all groups with workers of the model */
  int64_t gather_ms; /* for the workers to attach to it; then it begins without the rest; 0: 5000 */
  int64_t timeout_ms; /* for all of it; 0: 600000 */
} rk_update_options;
typedef struct rk_update_result {
  uint32_t size;         /* set by the caller */
  uint32_t members;      /* workers that were there at its start */
  uint32_t ready;        /* of them, that serve the version or are fit to */
  uint32_t by_broadcast; /* of those, that were given every byte by broadcast; others: by uploads or
                            pulls */
  uint64_t elapsed_ms;
} rk_update_result;
/* Waits for the end of the round. RK_NOT_FOUND: no such version, or no worker in the group.
 * RK_UNAVAILABLE: another round of the group runs, there is no coordinator, or not every member is
 * ready in the end: the message names one and why, `result` has how many are. Those that are not
 * get there by themselves if they can. RK_TIMEOUT: the round goes on. */
RK_API int32_t rk_update(rk_agent* agent, const rk_update_options* options,
                         rk_update_result* result, rk_error* error);

/* --- thousands of tensors of Python described in one call */

/* DLPackExchangeAPI.dltensor_from_py_object_no_sync of DLPack 1.3: fills a DLTensor that owns
 * nothing; 0, or -1 with a Python exception set. */
typedef int (*rk_dlpack_exporter)(void* py_object, void* dl_tensor);
typedef struct rk_tensor_layout {
  uint64_t data;       /* address of the first element; 0: the producer gives none */
  int32_t device_type; /* a DLDeviceType */
  int32_t device_id;
  uint8_t dtype_code; /* a DLDataTypeCode */
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  uint32_t dimensions;
  uint64_t first_dimension; /* where they begin in `shapes` and in `strides` */
  uint32_t contiguous;      /* 1: row-major without gaps; also a tensor without elements */
  uint32_t reserved;        /* 0 */
} rk_tensor_layout;

/* What `count` objects of the exporter's type are, in their order; shapes and strides, in elements,
 * one after another, `capacity` integers each. The caller holds the GIL and keeps the objects, of
 * each of which three words at least can be read; the exporter is called in this thread.
 * `*described` is how many were described before the first that could not be. RK_INVALID: the
 * exporter has failed (its exception is left set), or has given no shape. RK_EXHAUSTED: `capacity`
 * is too small. */
RK_API int32_t rk_describe_tensors(rk_dlpack_exporter exporter, void* const* objects, size_t count,
                                   rk_tensor_layout* layouts, int64_t* shapes, int64_t* strides,
                                   size_t capacity, size_t* described, rk_error* error);

#ifdef __cplusplus
}
#endif
#endif
