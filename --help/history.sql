BEGIN TRANSACTION;
CREATE TABLE records (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, uid INTEGER, pid INTEGER, fields TEXT NOT NULL
    );
INSERT INTO "records" VALUES(1,1.79575473356470775602e+09,'policy.loaded',NULL,NULL,'{"digest":"209619a9e602","files":["/tmp/mpsbacty1j6v/s/policy.toml"]}');
INSERT INTO "records" VALUES(2,1.79575473363816118244e+09,'action',NULL,NULL,'{"action":"StartControl","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(3,1.79575473371784639356e+09,'action.done',NULL,NULL,'{"action":"StartControl","begun":2,"ok":true,"text":"control daemon 3005 runs (started by this agent)","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(4,1795754733.71845,'action',NULL,NULL,'{"action":"Reconcile","reason":"compare its answer with what the agent knows","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(5,1.7957547337197070122e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":4,"ok":true,"text":"","reason":"compare its answer with what the agent knows","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(6,1.79575473377166843413e+09,'gate.connected',NULL,2996,'{}');
INSERT INTO "records" VALUES(7,1.79575473377376675608e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"confirm what a log says: servers of control daemon 3005","rule":"MPS confirms what a log says before mpsagent acts on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(8,1.79575473377702569963e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":7,"ok":true,"text":"","reason":"confirm what a log says: servers of control daemon 3005","rule":"MPS confirms what a log says before mpsagent acts on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(9,1.79575473400907540321e+09,'client.waiting',20001,3011,'{"connection":28184032907}');
INSERT INTO "records" VALUES(10,1.79575473401030468942e+09,'turn.began',20001,NULL,'{}');
INSERT INTO "records" VALUES(11,1795754734.016,'server.starting',20001,3013,'{}');
INSERT INTO "records" VALUES(12,1795754734.171,'server.ready',20001,3013,'{}');
INSERT INTO "records" VALUES(13,1.79575473417602610583e+09,'limits.verified',20001,NULL,'{"reason":"server 3013 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":3013}');
INSERT INTO "records" VALUES(14,1.79575473417595815658e+09,'client.connected',20001,3011,'{"waited":0.16688275337219238,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.16171503067016602}');
INSERT INTO "records" VALUES(15,1.79575473550450444215e+09,'client.waiting',20002,3057,'{"connection":28185528336}');
INSERT INTO "records" VALUES(16,1.79575473557485175129e+09,'client.ended',20001,3011,'{"server":3013,"outcome":"ok","seconds":1.3988935947418213,"waited":0.16688275337219238}');
INSERT INTO "records" VALUES(17,1.79575473557802915572e+09,'turn.ended',20001,NULL,'{"seconds":1.5677244663238525,"forced":false}');
INSERT INTO "records" VALUES(18,1.79575473557917547227e+09,'action',NULL,NULL,'{"action":"ShutdownServer","reason":"the last client of server 3013 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":3013,"force":false}');
INSERT INTO "records" VALUES(19,1.79575473558003640174e+09,'client.used',20001,3011,'{"seconds":1.399,"busy":0.0,"energy":139.9,"shared":false,"over":true}');
INSERT INTO "records" VALUES(20,1.79575473558211183545e+09,'action.done',NULL,NULL,'{"action":"ShutdownServer","begun":18,"ok":true,"text":"","reason":"the last client of server 3013 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":3013,"force":false}');
INSERT INTO "records" VALUES(21,1795754735.647,'server.ended',20001,3013,'{"status":0}');
INSERT INTO "records" VALUES(22,1.79575473564765381809e+09,'turn.began',20002,NULL,'{"gap":0.06962466239929199}');
INSERT INTO "records" VALUES(23,1795754735.656,'server.starting',20002,3063,'{}');
INSERT INTO "records" VALUES(24,1795754735.813,'server.ready',20002,3063,'{}');
INSERT INTO "records" VALUES(25,1.79575473582583451269e+09,'limits.verified',20002,NULL,'{"reason":"server 3063 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":3063}');
INSERT INTO "records" VALUES(26,1.79575473582576918604e+09,'client.connected',20002,3057,'{"waited":0.32126474380493164,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.17310523986816406}');
INSERT INTO "records" VALUES(27,1.79575473721690034864e+09,'lease.given',20003,NULL,'{"number":1,"by":0,"until":1821674737.2169003,"job":"job-7"}');
INSERT INTO "records" VALUES(28,1.79575473722998404501e+09,'drain.ordered',NULL,NULL,'{"by":0,"timeout":25920000.0}');
INSERT INTO "records" VALUES(29,1.79575473723014736177e+09,'drain.begun',NULL,NULL,'{"reason":"no new client is admitted; clients at work go on for 300d00h","rule":"drain","enforce":true}');
CREATE TABLE sessions (
        number INTEGER PRIMARY KEY, kind TEXT NOT NULL, instance TEXT, uid INTEGER, pid INTEGER NOT NULL,
        came REAL NOT NULL, passed REAL, ended REAL, outcome TEXT, why TEXT, job TEXT, more TEXT NOT NULL
    );
INSERT INTO "sessions" VALUES(9,'client',NULL,20001,3011,1.79575473400907540321e+09,1.79575473417595815658e+09,1.79575473557485175129e+09,'ok',NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488,"counted":1.399,"busy":0.0,"energy":139.9,"shared":false}');
INSERT INTO "sessions" VALUES(10,'turn',NULL,20001,0,1.79575473401030468942e+09,1.79575473401030468942e+09,1.79575473557802915572e+09,'left',NULL,NULL,'{"gap":null,"before":null}');
INSERT INTO "sessions" VALUES(15,'client',NULL,20002,3057,1.79575473550450444215e+09,1.79575473582576918604e+09,NULL,NULL,NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488}');
INSERT INTO "sessions" VALUES(22,'turn',NULL,20002,0,1.79575473564765381809e+09,1.79575473564765381809e+09,NULL,NULL,NULL,NULL,'{"gap":0.06962466239929199,"before":20001}');
CREATE INDEX records_uid ON records (uid) WHERE uid IS NOT NULL;
CREATE INDEX records_pid ON records (pid) WHERE pid IS NOT NULL;
CREATE INDEX sessions_kind ON sessions (kind, uid, passed, ended);
CREATE INDEX sessions_open ON sessions (number) WHERE ended IS NULL;
COMMIT;
PRAGMA user_version=4;
