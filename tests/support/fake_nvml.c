/* A libnvidia-ml.so.1 that answers from a table: the file named by FAKE_NVML.

   Each line is `key=code value`; a key that is missing answers NVML_ERROR_NOT_SUPPORTED. GPUs are numbered
   from 0, the MIG part p of GPU g is 100 * (g + 1) + p. OLD_DRIVER and WITHOUT_P2P leave symbols out. */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NOT_SUPPORTED = 3, VERSION_MISMATCH = 25 };
typedef void *Device;
typedef struct {
  char bus_legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
} Pci;

static int number(Device device) { return (int)((long)device - 1); }
static Device handle(int of) { return (Device)(long)(of + 1); }

/* The code for a key; its value goes to `value`. */
static int look(char value[256], const char *format, ...) {
  static char lines[4096][256];
  static int count = -1;
  char key[64];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(key, sizeof key, format, arguments);
  va_end(arguments);
  if (count < 0) {
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    for (count = 0; count < 4096 && fgets(lines[count], 256, file); count++)
      lines[count][strcspn(lines[count], "\n")] = 0;
    fclose(file);
  }
  for (int i = 0; i < count; i++) {
    size_t length = strcspn(lines[i], "=");
    if (strlen(key) == length && !strncmp(lines[i], key, length)) {
      int code = NOT_SUPPORTED;
      value[0] = 0;
      sscanf(lines[i] + length + 1, "%d %255[^\n]", &code, value);
      return code;
    }
  }
  return NOT_SUPPORTED;
}

static int look_int(unsigned *out, const char *what, int a, int b) {
  char value[256];
  int code = look(value, b < 0 ? "%s %d" : "%s %d %d", what, a, b);
  if (!code) *out = (unsigned)strtoul(value, 0, 0);
  return code;
}

static int look_text(char *out, const char *what, int a) {
  char value[256];
  int code = look(value, "%s %d", what, a);
  if (!code) strcpy(out, value);
  return code;
}

static int look_pci(Pci *out, const char *what, int a, int b) {
  char value[256];
  int code = look(value, b < 0 ? "%s %d" : "%s %d %d", what, a, b);
  memset(out, 0, sizeof *out);
  if (!code) strncpy(out->bus_id, value, sizeof out->bus_id - 1);
  return code;
}

static int look_words(unsigned long long *out, unsigned size, const char *what, int a) {
  char value[256];
  int code = look(value, "%s %d", what, a);
  memset(out, 0, 8 * size);
  if (!code) out[0] = strtoull(value, 0, 0);
  return code;
}

int nvmlInitWithFlags(unsigned flags) { unsigned none; return look_int(&none, "init", 0, -1); }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { return look_int(out, "count", 0, -1); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *out) {
  unsigned none;
  *out = handle(index);
  return look_int(&none, "handle", index, -1);
}
int nvmlDeviceGetUUID(Device d, char *out, unsigned size) { return look_text(out, "uuid", number(d)); }
int nvmlDeviceGetName(Device d, char *out, unsigned size) { return look_text(out, "name", number(d)); }
int nvmlDeviceGetMemoryInfo(Device d, unsigned long long out[3]) {
  return look_words(out, 3, "memory", number(d));
}
int nvmlDeviceGetPciInfo_v3(Device d, Pci *out) { return look_pci(out, "pci", number(d), -1); }
int nvmlDeviceGetNvLinkState(Device d, unsigned link, unsigned *out) {
  return look_int(out, "state", number(d), link);
}
int nvmlDeviceGetNvLinkVersion(Device d, unsigned link, unsigned *out) {
  return look_int(out, "version", number(d), link);
}
int nvmlDeviceGetNvLinkCapability(Device d, unsigned link, unsigned capability, unsigned *out) {
  return capability == 0 ? look_int(out, "peer", number(d), link) : NOT_SUPPORTED;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device d, unsigned link, Pci *out) {
  return look_pci(out, "end", number(d), link);
}
int nvmlDeviceGetTopologyCommonAncestor(Device a, Device b, unsigned *out) {
  return look_int(out, "ancestor", number(a), number(b));
}
int nvmlDeviceGetMigMode(Device d, unsigned *current, unsigned *pending) {
  *pending = 0;
  return look_int(current, "mig", number(d), -1);
}
int nvmlDeviceGetMaxMigDeviceCount(Device d, unsigned *out) { return look_int(out, "parts", number(d), -1); }
int nvmlDeviceGetMigDeviceHandleByIndex(Device d, unsigned index, Device *out) {
  unsigned none;
  *out = handle(100 * (number(d) + 1) + index);
  return look_int(&none, "part", number(d), index);
}
int nvmlDeviceGetCpuAffinity(Device d, unsigned size, unsigned long long *out) {
  return look_words(out, size, "cpus", number(d));
}

#ifndef WITHOUT_P2P
int nvmlDeviceGetP2PStatus(Device a, Device b, unsigned index, unsigned *out) {
  return index == 2 ? look_int(out, "p2p", number(a), number(b)) : NOT_SUPPORTED;
}
#endif

#ifndef OLD_DRIVER
int nvmlDeviceGetNvLinkRemoteDeviceType(Device d, unsigned link, unsigned *out) {
  return look_int(out, "type", number(d), link);
}
int nvmlDeviceGetMemoryAffinity(Device d, unsigned size, unsigned long long *out, unsigned scope) {
  return look_words(out, size, "nodes", number(d));
}

typedef struct {
  unsigned version;
  unsigned char cluster[16];
  unsigned status, clique, state, mask;
  unsigned char summary; /* from version 3 on */
} Fabric;

/* `fabric N=code version state status cluster clique mask summary`: `version` is the newest the driver knows;
   the 16 bytes of the cluster's UUID are all `cluster`. */
int nvmlDeviceGetGpuFabricInfoV(Device d, Fabric *out) {
  char value[256];
  unsigned newest, cluster, summary;
  int code = look(value, "fabric %d", number(d));
  if (code) return code;
  Fabric read = {.version = out->version};
  sscanf(value, "%u %u %u %u %u %u %u", &newest, &read.state, &read.status, &cluster, &read.clique, &read.mask,
         &summary);
  if (out->version >> 24 > newest) return VERSION_MISMATCH;
  memset(read.cluster, cluster, 16);
  read.summary = summary;
  memcpy(out, &read, out->version & 0xffffff);
  return 0;
}
#endif
